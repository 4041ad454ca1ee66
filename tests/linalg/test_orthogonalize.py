# SPDX-License-Identifier: MIT
"""Methods of "orthogonalize", and polar."""

import pytest
import torch
from torch import Tensor

import metalcore
from metalcore._accuracy import error, tolerance
from tests.backends import Backend
from tests.check import check_op, check_registration
from tests.linalg.inputs import MATRICES

METHODS = ("auto", "householder", "tsqr", "cholesky", "polar")


def _off(Q: Tensor) -> float:
    """How far the shorter side of Q is from orthonormal."""
    q = Q.cpu().double()
    q = q if q.shape[-2] >= q.shape[-1] else q.mT
    return error(q.mT @ q, torch.eye(q.shape[-1]).expand(*q.shape[:-2], -1, -1))


@pytest.mark.parametrize("method", METHODS)
def test_any_shape(method: str) -> None:
    for size in ((1000, 10), (10, 1000), (3, 100), (2, 3, 5), (7, 7), (5, 1), (1, 5), (0, 4)):
        A = torch.randn(size)
        Q = metalcore.orthogonalize(A, method)
        assert Q.shape == A.shape
        assert _off(Q) <= tolerance("qr", torch.float32, max(size)) / 2


@pytest.mark.parametrize("method", METHODS)
def test_hard_matrices(method: str) -> None:
    for name, make in MATRICES.items():
        for m, n in ((40, 12), (9, 20)):
            Q = metalcore.orthogonalize(make(m, n).float(), method)
            assert _off(Q) <= tolerance("qr", torch.float32, max(m, n)) / 2, (name, m, n)


def _signed_as(Q: Tensor, truth: Tensor) -> Tensor:
    return Q * (Q.cpu().double() * truth).sum(-2, keepdim=True).sign().to(Q)


def test_methods_agree_but_for_signs(backend: Backend) -> None:
    A = backend.randn(2, 20, 6) + 3 * torch.eye(20, 6, device=backend.device)
    truth = torch.linalg.qr(A.cpu().double())[0]
    for method in ("auto", "householder", "tsqr", "cholesky"):
        found = _signed_as(metalcore.orthogonalize(A, method), truth)
        assert error(found, truth) <= tolerance("qr", torch.float32, 20), method


def test_products_alone_find_the_nearest_up_to_condition_100() -> None:
    for m, n in ((60, 20), (20, 60), (30, 30)):
        for scale in (1e-30, 1.0, 1e30):
            U, V = (torch.linalg.qr(torch.randn(k, min(m, n)))[0] for k in (m, n))
            A = scale * (U * torch.logspace(0, -2, min(m, n))) @ V.mT
            Q = metalcore.orthogonalize(A, "newton_schulz")
            assert error(Q, U @ V.mT) <= 100 * tolerance("orthogonalize", torch.float32, max(m, n))
            assert _off(Q) <= tolerance("orthogonalize", torch.float32, max(m, n))
    assert not metalcore.orthogonalize(torch.zeros(5, 3), "newton_schulz").any()


def test_blocks_of_rows_in_levels() -> None:
    A = torch.randn(2000, 40, dtype=torch.float64)
    found, truth = (metalcore.orthogonalize(A, m) for m in ("tsqr", "householder"))
    assert error(_signed_as(found, truth), truth) <= tolerance("qr", torch.float64, 2000)


def test_cholesky_is_orthonormal_to_the_last_digit_at_condition_1e8() -> None:
    A = MATRICES["condition 1e8"](300, 60).float()
    Q = metalcore.orthogonalize(A, "cholesky").double()
    assert torch.linalg.matrix_norm(Q.mT @ Q - torch.eye(60), 2) <= 1e-7


@pytest.mark.parametrize("size", [(2, 3, 5, 1), (2, 40, 17), (1, 1100, 3), (70, 33), (0, 4, 2)])
def test_cholesky_matches_reference(backend: Backend, size: tuple[int, ...]) -> None:
    for dtype in backend.dtypes:
        A = backend.randn(*size) + 3 * torch.eye(*size[-2:], device=backend.device)
        check_op(backend, "orthogonalize", (A.to(dtype),), reduces_over=size[-2])


def test_cholesky_registration() -> None:
    check_registration("orthogonalize", (torch.randn(2, 5, 3) + 3 * torch.eye(5, 3),))


@pytest.mark.parametrize("size", [(40, 12), (33, 33), (300, 4)], ids=str)
def test_cholesky_on_metal_takes_every_hard_matrix(size: tuple[int, int]) -> None:
    A = torch.stack([make(*size) for make in MATRICES.values()]).float()
    with metalcore.simulate():
        Q = metalcore.orthogonalize(A, "cholesky").double()
    off = torch.linalg.matrix_norm(Q.mT @ Q - torch.eye(size[1]), 2)
    left = torch.linalg.vector_norm(A - Q @ (Q.mT @ A.double()), dim=-2)
    left = left / torch.linalg.vector_norm(A.double(), dim=-2).clamp_min(1e-40)
    for name, a, b in zip(MATRICES, off.tolist(), left.amax(-1).tolist(), strict=True):
        assert a <= 1e-7, name
        assert b <= 1e-6, name


def test_cholesky_on_metal_does_not_hide_what_it_cannot_do() -> None:
    torch.manual_seed(0)
    A = torch.stack([MATRICES["triangular"](200, 200), MATRICES["random"](200, 200)]).float()
    with metalcore.simulate(checks="none"):
        Q = metalcore.orthogonalize(A, "cholesky")
    assert Q[0].isnan().any()
    assert _off(Q[1]) <= 1e-6


def test_cholesky_replaces_only_what_failed() -> None:
    A = torch.randn(3, 30, 8)
    A[1, :, 5] = A[1, :, 2]
    Q = metalcore.orthogonalize(A, "cholesky")
    assert _off(Q) <= tolerance("qr", torch.float32, 30)
    assert torch.equal(Q[0], metalcore.orthogonalize(A[0], "cholesky"))
    assert torch.equal(Q[1].abs(), torch.linalg.qr(A[1])[0].abs())


def test_polar_is_the_nearest_orthonormal_matrix(backend: Backend) -> None:
    for size in ((2, 9, 5), (6, 6), (4, 9)):
        for dtype in backend.dtypes:
            A = (backend.randn(*size) + 3 * torch.eye(*size[-2:], device=backend.device)).to(dtype)
            W, _, Vh = torch.linalg.svd(A.cpu().double(), full_matrices=False)
            U = metalcore.polar(A)
            assert U.dtype == dtype
            assert error(U, W @ Vh) <= tolerance("qr", dtype, max(size))


@pytest.mark.parametrize("size", [(33, 9), (66, 66), (65, 80)], ids=str)
def test_polar_in_a_fixed_number_of_steps(size: tuple[int, int]) -> None:
    A = torch.stack([make(*size) for make in MATRICES.values()]).float()
    with metalcore.simulate(checks="none"):
        U = metalcore.polar(A).double()
    tall, D = (U, A.double()) if size[0] >= size[1] else (U.mT, A.mT.double())
    off = torch.linalg.matrix_norm(tall.mT @ tall - torch.eye(min(size)), 2)
    H = tall.mT @ D
    skew = torch.linalg.matrix_norm(H - H.mT) / torch.linalg.matrix_norm(D).clamp_min(1e-40)
    for name, a, b in zip(MATRICES, off.tolist(), skew.tolist(), strict=True):
        assert max(a, b) <= 1e-6 * max(size) ** 0.5, name


def test_polar_compiles_and_maps() -> None:
    compiled = torch.compile(metalcore.polar, fullgraph=True, backend="eager")
    for size in ((3, 9, 5), (2, 70, 66)):
        A = torch.randn(size)
        truth = metalcore.polar(A.double())
        for U in (compiled(A), torch.func.vmap(metalcore.polar)(A)):
            assert error(U, truth) <= tolerance("qr", torch.float32, max(size)), size
    A = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(metalcore.polar(A).sum(), A)
    torch.testing.assert_close(torch.func.grad(lambda a: metalcore.polar(a).sum())(A), found)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_polar_of_any_scale(scale: float) -> None:
    A = torch.randn(8, 8) + 3 * torch.eye(8)
    U = metalcore.polar(A * scale)
    assert error(U, metalcore.polar(A.double())) <= tolerance("qr", torch.float32, 8)


def test_gradients() -> None:
    for m, n in ((5, 3), (3, 3), (2, 4)):
        A = (torch.randn(m, n) + 2 * torch.eye(m, n)).double().requires_grad_()
        assert torch.autograd.gradcheck(metalcore.orthogonalize, (A,))
        assert torch.autograd.gradcheck(metalcore.polar, (A,))
    assert torch.autograd.gradgradcheck(metalcore.polar, (A,))


def test_nan_gives_nan() -> None:
    A = torch.randn(6, 3)
    A[2, 1] = float("nan")
    for method in METHODS:
        assert metalcore.orthogonalize(A, method).isnan().any()


def test_unknown_method_is_named() -> None:
    with pytest.raises(ValueError, match="orthogonalize: method must be"):
        metalcore.orthogonalize(torch.randn(3, 3), "gram")
