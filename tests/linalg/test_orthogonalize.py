# SPDX-License-Identifier: MIT
"""Methods of "orthogonalize", and polar."""

import pytest
import torch
from torch import Tensor

import metalcore
from metalcore._accuracy import error, tolerance
from tests.backends import Backend
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


def test_blocks_of_rows_in_levels() -> None:
    A = torch.randn(2000, 40, dtype=torch.float64)
    found, truth = (metalcore.orthogonalize(A, m) for m in ("tsqr", "householder"))
    assert error(_signed_as(found, truth), truth) <= tolerance("qr", torch.float64, 2000)


def test_cholesky_is_orthonormal_to_the_last_digit_at_condition_1e8() -> None:
    A = MATRICES["condition 1e8"](300, 60).float()
    Q = metalcore.orthogonalize(A, "cholesky").double()
    assert torch.linalg.matrix_norm(Q.mT @ Q - torch.eye(60), 2) <= 1e-7


def test_cholesky_replaces_only_what_failed() -> None:
    A = torch.randn(3, 30, 8)
    A[1, :, 5] = A[1, :, 2]
    Q = metalcore.orthogonalize(A, "cholesky")
    assert _off(Q) <= tolerance("qr", torch.float32, 30)
    assert torch.equal(Q[0], metalcore.orthogonalize(A[0], "cholesky"))
    assert torch.equal(Q[1], metalcore.orthogonalize(A[1:2], "householder")[0])


def test_polar_is_the_nearest_orthonormal_matrix(backend: Backend) -> None:
    for size in ((2, 9, 5), (6, 6), (4, 9)):
        for dtype in backend.dtypes:
            A = (backend.randn(*size) + 3 * torch.eye(*size[-2:], device=backend.device)).to(dtype)
            W, _, Vh = torch.linalg.svd(A.cpu().double(), full_matrices=False)
            U = metalcore.polar(A)
            assert U.dtype == dtype
            assert error(U, W @ Vh) <= tolerance("qr", dtype, max(size))


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
