# SPDX-License-Identifier: MIT
from itertools import product

import pytest
import torch
from torch import Tensor

import metalcore
from metalcore._accuracy import error, tolerance
from tests.backends import Backend, lanes
from tests.check import check_op, check_registration

CASES = [
    # batch, n, k, why
    ((5,), 5, 1, "several systems per simdgroup, one right side"),
    ((3, 3), 8, 5, "two batch dimensions"),
    ((17,), 13, 3, "a group of lanes that is not full"),
    ((2,), 31, 16, "one system per simdgroup"),
    ((2,), 47, 2, "two rows per lane"),
    ((3,), 16, 17, "a right side per thread"),
    ((2,), 30, 33, "right sides that fill registers, and one more"),
    ((), 64, 40, "one system, without a batch"),
    ((2,), 70, 1, "more rows than one block"),
    ((2,), 97, 24, "blocks with many right sides"),
    ((4,), 1, 1, "one unknown"),
    ((0,), 6, 2, "no systems"),
    ((3,), 0, 2, "no unknowns"),
    ((3,), 4, 0, "no right sides"),
]
KINDS = list(product((True, False), repeat=3))


def _triangular(backend: Backend, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    n = size[-1]
    A = backend.randn(*size) / max(1, n) + 2 * torch.eye(n, device=backend.device)
    return A.to(dtype)


@pytest.mark.parametrize("case", CASES, ids=[c[-1] for c in CASES])
def test_matches_reference(backend: Backend, case: tuple[tuple[int, ...], int, int, str]) -> None:
    batch, n, k, _ = case
    for i, dtype in enumerate(backend.dtypes):
        A = _triangular(backend, *batch, n, n, dtype=dtype)
        B = backend.randn(*batch, n, k, dtype=dtype)
        # each dtype and case another of the eight kinds
        kind = KINDS[(3 * i + n + k) % 8]
        check_op(backend, "trsm", (A, B, *kind), reduces_over=max(n, k))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kind_reads_its_triangle_only(
    backend: Backend, kind: tuple[bool, bool, bool]
) -> None:
    lower, transpose, unit = kind
    for n, k in ((6, 1), (19, 9), (40, 17), (66, 2)):
        A, B = _triangular(backend, 2, n, n), backend.randn(2, n, k)
        used = torch.ones(n, n, device=A.device).tril() if lower else torch.ones_like(A[0]).triu()
        used = used - torch.eye(n, device=A.device) if unit else used
        A = A.where(used > 0, float("nan"))
        X = metalcore.trsm(A, B, *kind)
        exact = A.cpu().double().nan_to_num(nan=0.0)
        exact = exact + torch.eye(n) if unit else exact
        truth = torch.linalg.solve(exact.mT if transpose else exact, B.cpu().double())
        assert error(X, truth) <= tolerance("trsm", torch.float32, n)


def test_paths_of_the_cpu_kernel() -> None:
    device, found = Backend("cpu"), []
    few, many = lanes() - 1, lanes()
    for batch, n, k in ((20, 16, few), (20, 16, many), (20, 300, 2), (2, 80, 2), (2, 321, many)):
        with metalcore.trace() as t:
            A, B = _triangular(device, batch, n, n), device.randn(batch, n, k)
            torch.ops.metalcore.trsm(A, B, True, False, False)
        found.append(t.records[0].variant)
    assert found == ["interleaved", "rows", "lapack", "lapack", "lapack"]


def test_vectors_and_broadcast_batches(backend: Backend) -> None:
    A, B = _triangular(backend, 4, 3, 6, 6), backend.randn(4, 3, 6)
    # as many dimensions as vectors of another batch would have: a matrix that broadcasts
    for right in (B, B[0, 0], B[..., None], B[0, 0, :, None], backend.randn(3, 6, 6)):
        vectors = right.dim() == 1 or right.shape == B.shape
        X = metalcore.trsm(A, right)
        truth = torch.linalg.solve(
            A.cpu().double().tril(), (right[..., None] if vectors else right).cpu().double()
        )
        assert error(X, truth.squeeze(-1) if vectors else truth) <= tolerance(
            "trsm", torch.float32, 6
        )
    X = metalcore.trsm(A[0, 0], B[..., None])
    assert X.shape == (4, 3, 6, 1)
    assert metalcore.trsm_batched is metalcore.trsm


def _substituted(A: Tensor, B: Tensor) -> Tensor:
    """X of lower triangles A, row by row, in float64."""
    A, X = A.cpu().double(), B.cpu().double()
    for i in range(A.shape[-1]):
        for j in range(i):
            X[:, i] -= A[:, i, j, None] * X[:, j]
        X[:, i] /= A[:, i, i, None]
    return X


def test_zeros_and_other_hard_values_on_the_diagonal(backend: Backend) -> None:
    for n, k in ((5, 1), (5, 9), (5, 40)):
        A, B = _triangular(backend, 20, n, n), backend.randn(20, n, k)
        A[3, 2, 2] = 0.0
        A[4, 1, 1] = float("nan")
        # reciprocals of these are not finite or not normal
        A[5] *= 1e-39
        B[5] *= 1e-39
        A[6] *= 1e38
        B[6, 0] = 0.0
        X, truth = metalcore.trsm(A, B).cpu(), _substituted(A, B).float()
        # a GPU may take subnormal numbers as zeros
        keep = [i for i in range(20) if i != 5 or backend.name == "cpu"]
        torch.testing.assert_close(X[keep], truth[keep], equal_nan=True)


def test_one_system_alone_is_that_of_a_batch() -> None:
    A, B = torch.randn(6, 6) / 6 + 2 * torch.eye(6), torch.randn(6, 2)
    alone = metalcore.trsm(A, B, True, True)
    torch.testing.assert_close(alone, metalcore.trsm(A.expand(40, 6, 6), B, True, True)[7])


def test_results_do_not_depend_on_threads() -> None:
    before = torch.get_num_threads()
    A, B = torch.randn(300, 24, 24) / 24 + 2 * torch.eye(24), torch.randn(300, 24, 40)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append((metalcore.trsm(A, B), metalcore.trsm(A, B[..., :1])))
    torch.set_num_threads(before)
    for many, one in found[1:]:
        assert torch.equal(many, found[0][0])
        assert torch.equal(one, found[0][1])


def test_derivatives_and_registration() -> None:
    A, B = torch.randn(2, 3, 3) / 3 + 2 * torch.eye(3), torch.randn(2, 3, 1)
    check_registration("trsm", (A, B, False, True, True))


def test_compiles_and_maps(device: Backend) -> None:
    A, B = _triangular(device, 3, 7, 7), device.randn(3, 7, 2).requires_grad_()

    def solve(A: Tensor, B: Tensor) -> Tensor:
        return metalcore.trsm(A, B, transpose=True)

    compiled = torch.compile(solve, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(A, B), solve(A, B))
    (dB,) = torch.autograd.grad(compiled(A, B).square().sum(), B)
    (expected,) = torch.autograd.grad(solve(A, B).square().sum(), B)
    torch.testing.assert_close(dB, expected)
    torch.testing.assert_close(torch.func.vmap(solve)(A, B), solve(A, B))
    torch.testing.assert_close(torch.func.vmap(solve, in_dims=(None, 0))(A[0], B), solve(A[:1], B))


x8 = torch.randn(8, 8)
BAD = [
    (
        lambda: metalcore.trsm(x8[:7], x8),
        ValueError,
        "trsm: A must be square matrices [..., N, N], got [7, 8]",
    ),
    (
        lambda: metalcore.trsm(x8[0], x8),
        ValueError,
        "trsm: A must be square matrices [..., N, N], got [8]",
    ),
    (
        lambda: metalcore.trsm(x8, x8[:7]),
        ValueError,
        "trsm: B must be [..., 8, K] or [..., 8] with batch dimensions that broadcast with those "
        "of A; got A [8, 8] and B [7, 8]",
    ),
    (
        lambda: metalcore.trsm(x8, x8[0, :7]),
        ValueError,
        "trsm: B must be [..., 8, K] or [..., 8] with batch dimensions that broadcast with those "
        "of A; got A [8, 8] and B [7]",
    ),
    (
        lambda: metalcore.trsm(x8.expand(2, 8, 8), x8.expand(3, 8, 8)),
        ValueError,
        "trsm: B must be [..., 8, K] or [..., 8] with batch dimensions that broadcast with those "
        "of A; got A [2, 8, 8] and B [3, 8, 8]",
    ),
    (
        lambda: metalcore.trsm(x8, x8.double()),
        TypeError,
        "trsm: all of these must have one dtype, got A float32 and B float64; convert with .to()",
    ),
    (
        lambda: metalcore.trsm(x8.long(), x8.long()),
        TypeError,
        "trsm: A must be float32, float64, float16 or bfloat16, got int64; "
        "convert it with A.float()",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[b[2][:50] for b in BAD])
def test_bad_input_is_named(call, kind, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message
