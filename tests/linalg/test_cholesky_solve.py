# SPDX-License-Identifier: MIT
import pytest
import torch
from torch import Tensor

import metalcore
from metalcore._accuracy import error, tolerance
from tests.backends import Backend, lanes
from tests.check import check_op, check_registration

CASES = [
    # batch, n, k, why
    ((5,), 6, 1, "several systems per simdgroup, one right side"),
    ((3, 3), 8, 5, "two batch dimensions"),
    ((9,), 14, 3, "a group of lanes that is not full"),
    ((2,), 31, 16, "one system per simdgroup"),
    ((2,), 40, 2, "two rows per lane"),
    ((3,), 12, 17, "a right side per thread"),
    ((2,), 30, 33, "right sides that fill registers, and one more"),
    ((), 50, 20, "one system, without a batch"),
    ((2,), 70, 3, "more rows than one block"),
    ((4,), 1, 1, "one unknown"),
    ((0,), 6, 2, "no systems"),
    ((3,), 0, 2, "no unknowns"),
    ((3,), 4, 0, "no right sides"),
]


def _factor(backend: Backend, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    n = size[-1]
    L = backend.randn(*size) / max(1, n) + 2 * torch.eye(n, device=backend.device)
    return L.to(dtype)


@pytest.mark.parametrize("case", CASES, ids=[c[-1] for c in CASES])
def test_matches_reference(backend: Backend, case: tuple[tuple[int, ...], int, int, str]) -> None:
    batch, n, k, _ = case
    for i, dtype in enumerate(backend.dtypes):
        L = _factor(backend, *batch, n, n, dtype=dtype)
        B = backend.randn(*batch, n, k, dtype=dtype)
        check_op(backend, "cholesky_solve", (B, L, (i + n) % 2 == 1), reduces_over=max(n, k))


@pytest.mark.parametrize("upper", [False, True])
def test_solves_the_system_that_was_factored(backend: Backend, upper: bool) -> None:
    for n, k in ((7, 2), (20, 20), (66, 4)):
        x, B = backend.randn(3, n, n), backend.randn(3, n, k)
        A = x @ x.mT / n + torch.eye(n, device=x.device)
        L = metalcore.cholesky(A, upper=upper)
        assert isinstance(L, Tensor)
        # the other triangle is not read
        L = L + torch.full_like(L, float("nan")).triu(1).mT if upper else L
        X = metalcore.cholesky_solve(B, L, upper=upper)
        truth = torch.linalg.solve(A.cpu().double(), B.cpu().double())
        assert error(X, truth) <= tolerance("cholesky_solve", torch.float32, n)


def test_batches_broadcast_and_right_sides_are_matrices(backend: Backend) -> None:
    L, B = _factor(backend, 3, 3, 3), backend.randn(3, 3)
    # [3, 3] would be vectors for trsm
    truth = torch.cholesky_solve(B.cpu().double(), L.cpu().double().tril())
    X = metalcore.cholesky_solve(B, L)
    assert error(X, truth) <= tolerance("cholesky_solve", torch.float32, 3)
    assert metalcore.cholesky_solve(backend.randn(4, 1, 3, 2), L).shape == (4, 3, 3, 2)


def test_paths() -> None:
    found = []
    few, many = lanes() - 1, lanes()
    for batch, n, k in ((40, 16, few), (40, 16, many), (3, 330, many)):
        L = _factor(Backend("cpu"), batch, n, n)
        with metalcore.trace() as t:
            torch.ops.metalcore.cholesky_solve(torch.randn(batch, n, k), L, False)
        found.append(t.records[0].variant)
    assert found == ["interleaved", "rows", "lapack"]


def test_small_systems_are_those_of_torch() -> None:
    for upper in (False, True):
        L, B = _factor(Backend("cpu"), 6, 6), torch.randn(6, 2)
        truth = torch.cholesky_solve(B.double(), L.double().triu() if upper else L.double(), upper)
        X = metalcore.cholesky_solve(B, L, upper=upper)
        assert error(X, truth) <= tolerance("cholesky_solve", torch.float32, 6)


def test_derivatives_and_registration() -> None:
    L, B = torch.randn(2, 2, 2) / 2 + 2 * torch.eye(2), torch.randn(2, 2, 1)
    check_registration("cholesky_solve", (B, L, False))
    with_upper = (B[0], L[0], True)
    check_op(Backend("cpu"), "cholesky_solve", with_upper, reduces_over=2)


def test_compiles_and_maps(device: Backend) -> None:
    L, B = _factor(device, 3, 7, 7), device.randn(3, 7, 2).requires_grad_()
    compiled = torch.compile(metalcore.cholesky_solve, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(B, L), metalcore.cholesky_solve(B, L))
    mapped = torch.func.vmap(metalcore.cholesky_solve)(B, L)
    torch.testing.assert_close(mapped, metalcore.cholesky_solve(B, L))


x8 = torch.randn(8, 8)
BAD = [
    (
        lambda: metalcore.cholesky_solve(x8, x8[:7]),
        ValueError,
        "cholesky_solve: L must be square matrices [..., N, N], got [7, 8]",
    ),
    (
        lambda: metalcore.cholesky_solve(x8[0], x8),
        ValueError,
        "cholesky_solve: B must be matrices [..., M, N], got [8]",
    ),
    (
        lambda: metalcore.cholesky_solve(x8[:7], x8),
        ValueError,
        "cholesky_solve: B must be [..., 8, K] with batch dimensions that broadcast "
        "with those of L; got L [8, 8] and B [7, 8]",
    ),
    (
        lambda: metalcore.cholesky_solve(x8.double(), x8),
        TypeError,
        "cholesky_solve: all of these must have one dtype, got B float64 and L float32; "
        "convert with .to()",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[b[2][:50] for b in BAD])
def test_bad_input_is_named(call, kind, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message
