# SPDX-License-Identifier: MIT
import pytest
import torch

import metalcore
from metalcore._accuracy import error, tolerance
from tests.backends import Backend
from tests.check import check_op, check_registration
from tests.linalg.inputs import MATRICES

CASES = [
    # shape, why
    ((5, 7, 7), "several matrices per simdgroup"),
    ((3, 3, 9, 5), "tall, two batch dimensions"),
    ((11, 5, 13), "wide, a group of lanes that is not full"),
    ((2, 31, 17), "one matrix per simdgroup"),
    ((2, 40, 33), "one matrix per threadgroup"),
    ((1, 70, 37), "tall, in panels"),
    ((1, 37, 70), "wide, in panels"),
    ((2, 66, 66), "a panel of two columns"),
    ((4, 1, 1), "one value"),
    ((7, 5), "one matrix, without a batch"),
    ((0, 6, 2), "no matrices"),
    ((3, 0, 2), "no rows"),
    ((3, 4, 0), "no columns"),
]


@pytest.mark.parametrize("size", [c[0] for c in CASES], ids=[c[1] for c in CASES])
def test_matches_reference(backend: Backend, size: tuple[int, ...]) -> None:
    m, n = size[-2:]
    for dtype in backend.dtypes:
        # far from a tie between pivots, so that every dtype takes the same
        A = backend.randn(*size) / max(1, m, n) ** 0.5
        A = A + 2 * torch.eye(m, n, device=A.device).roll(m // 2, 0)
        check_op(backend, "lu", (A.to(dtype),), reduces_over=max(m, n))


def test_is_what_torch_gives(backend: Backend) -> None:
    for size in ((5, 6, 6), (2, 9, 4), (2, 4, 9), (1, 40, 40), (1, 66, 40)):
        A = backend.randn(*size)
        P, L, U = metalcore.lu(A)
        truth = torch.linalg.lu(A.cpu().double())
        assert torch.equal(P.cpu().double(), truth.P)
        for found, true in ((L, truth.L), (U, truth.U), (P @ L @ U, A.cpu().double())):
            assert error(found, true) <= 10 * tolerance("lu", torch.float32, max(size))
        assert torch.equal(L, L.tril())
        assert torch.equal(U, U.triu())


def test_every_matrix_has_factors(backend: Backend) -> None:
    for m, n in ((5, 5), (33, 20), (12, 40), (70, 66)):
        names = MATRICES if m < 70 else ("zeros", "rank n/2", "repeated columns", "graded")
        A = torch.stack([MATRICES[k](m, n) for k in names]).to(backend.device, torch.float32)
        P, L, U = (x.cpu().double() for x in metalcore.lu(A))
        size = A.cpu().double().norm(dim=(-2, -1))
        off = (P @ L @ U - A.cpu().double()).norm(dim=(-2, -1))
        assert (off <= tolerance("lu", torch.float32, max(m, n)) * size).all()
        assert (L.abs() <= 1).all()


def test_equal_pivots_are_taken_in_the_order_of_rows(backend: Backend) -> None:
    signs = torch.randint(0, 2, (4, 6, 6)) * 2.0 - 1
    for A in (signs, torch.eye(6).flip(0).expand(4, 6, 6), torch.ones(1, 70, 40)):
        P, _, _ = metalcore.lu(A.to(backend.device))
        assert torch.equal(P.cpu(), torch.linalg.lu(A).P)


def test_paths_of_the_cpu_kernel() -> None:
    device, found = Backend("cpu"), []
    for size in ((20, 16, 12), (9, 16), (20, 140, 3), (1, 70, 40)):
        with metalcore.trace() as t:
            torch.ops.metalcore.lu(device.randn(*size))
        found.append(t.records[0].variant)
    assert found == ["interleaved", "interleaved", "lapack", "lapack"]


@pytest.mark.parametrize("size", [(3, 3), (3, 2), (2, 3)], ids=str)
def test_registration(size: tuple[int, ...]) -> None:
    A = torch.randn(size) / 4 + 2 * torch.eye(*size[-2:]).roll(1, 0)
    check_registration("lu", (A,))


def test_compile_and_vmap() -> None:
    A = torch.randn(6, 3, 5, 4)
    compiled = torch.compile(metalcore.lu, fullgraph=True, backend="aot_eager")
    for function in (compiled, torch.func.vmap(metalcore.lu)):
        for found, each in zip(function(A), metalcore.lu(A), strict=True):
            torch.testing.assert_close(found, each)


def test_no_gradient_is_asked_of_the_permutation() -> None:
    A = (torch.randn(20, 5, 5) + 5 * torch.eye(5)).requires_grad_()
    P, L, _ = metalcore.lu(A)
    assert not P.requires_grad
    (dA,) = torch.autograd.grad(L.square().sum(), A)
    exact = A.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(torch.linalg.lu(exact).L.square().sum(), exact)
    assert error(dA, truth) <= tolerance("lu", torch.float32, 5)


BAD = [
    (
        lambda: metalcore.lu(torch.randn(4)),
        ValueError,
        "lu: A must be matrices [..., M, N], got [4]",
    ),
    (
        lambda: metalcore.lu(torch.zeros(4, 4, dtype=torch.int32)),
        TypeError,
        "lu: A must be float32, float64, float16 or bfloat16, got int32; convert it with A.float()",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[b[2][:40] for b in BAD])
def test_bad_input_is_named(call, kind, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message
