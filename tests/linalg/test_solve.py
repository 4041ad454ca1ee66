# SPDX-License-Identifier: MIT
import pytest
import torch
from torch import Tensor

import metalcore
from metalcore._accuracy import error, tolerance
from metalcore._check import LinAlgError
from tests.backends import Backend
from tests.check import check_op, check_registration
from tests.linalg.inputs import MATRICES

CASES = [
    # batch, n, k, why
    ((5,), 5, 1, "several matrices per simdgroup, one right side"),
    ((3, 3), 8, 5, "two batch dimensions"),
    ((17,), 13, 9, "a group of lanes that is not full, a chunk and one more right side"),
    ((2,), 31, 3, "one matrix per simdgroup"),
    ((3,), 6, 35, "more right sides than a strip"),
    ((2,), 47, 2, "one matrix per threadgroup"),
    ((2,), 70, 1, "panels"),
    ((4,), 1, 1, "one unknown"),
    ((), 7, 2, "one matrix, without a batch"),
    ((0,), 6, 2, "no matrices"),
    ((3,), 0, 2, "no unknowns"),
    ((3,), 4, 0, "no right sides"),
]


def _systems(
    backend: Backend, batch: tuple[int, ...], n: int, k: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Well conditioned, with pivots far from the diagonal."""
    A = backend.randn(*batch, n, n) / (1 + n**0.5) + 2 * torch.eye(n, device=backend.device)
    return A.roll(n // 2, -2).to(dtype), backend.randn(*batch, n, k, dtype=dtype)


@pytest.mark.parametrize("case", CASES, ids=[c[-1] for c in CASES])
def test_matches_reference(backend: Backend, case: tuple[tuple[int, ...], int, int, str]) -> None:
    batch, n, k, _ = case
    for dtype in backend.dtypes:
        A, B = _systems(backend, batch, n, k, dtype)
        check_op(backend, "solve", (A, B, False), reduces_over=max(n, k))


def test_refined_solutions_are_right_to_the_last_bits(backend: Backend) -> None:
    for n, k in ((5, 3), (40, 1), (70, 2)):
        # condition 1e4 costs four digits without refinement
        A = torch.stack([MATRICES["condition 1e4"](n, n) for _ in range(2)]).float()
        B = torch.randn(2, n, k)
        truth = torch.linalg.solve(A.double(), B.double())
        A, B = A.to(backend.device), B.to(backend.device)
        X = metalcore.solve(A, B, refine=True)
        assert error(X, truth) <= torch.finfo(torch.float32).eps
        assert error(metalcore.solve(A, B), truth) > 10 * error(X, truth)
    for dtype in backend.dtypes:
        check_op(backend, "solve", (*_systems(backend, (2,), 9, 2, dtype), True), reduces_over=9)


def test_backward_error_on_hard_inputs(backend: Backend) -> None:
    hard = ("graded", "scaled by 1e-30", "scaled by 1e30", "condition 1e12", "hilbert")
    for dtype in {torch.float32, torch.float64} & set(backend.dtypes):
        for n in (4, 17, 40, 70):
            A = torch.stack([MATRICES[name](n, n) for name in hard]).to(backend.device, dtype)
            B = torch.ones(len(hard), n, 2, dtype=dtype, device=backend.device)
            X, _ = metalcore.solve(A, B, check=False)
            a, b, x = (t.cpu().double() for t in (A, B, X))
            # a system whose solution leaves the range of the dtype has no error to look at
            fine = x.isfinite().all(-1).all(-1)
            assert fine.sum() >= len(hard) - 2
            size = a.norm(dim=(-2, -1)) * x.norm(dim=(-2, -1)) + b.norm(dim=(-2, -1))
            off = (a @ x - b).norm(dim=(-2, -1)) / size
            assert off[fine].max() <= tolerance("solve", dtype, n)


def test_singular_matrices_are_named(backend: Backend) -> None:
    for n in (6, 40, 70):
        A, B = _systems(backend, (5,), n, 2)
        A[3, :, 2] = 0.0
        A[4] = 0.0
        with pytest.raises(LinAlgError) as caught:
            metalcore.solve(A, B)
        assert str(caught.value) == (
            "solve: (Batch element 3): The solver failed because the input matrix is singular. "
            "Use metalcore.lstsq or metalcore.pinv for singular matrices."
        )
        X, info = metalcore.solve(A, B, check=False)
        assert info.tolist() == [0, 0, 0, 3, 1]
        assert X[:3].isfinite().all()
    with pytest.raises(LinAlgError, match=r"^solve: The solver failed .* Use metalcore.lstsq"):
        metalcore.solve(torch.zeros(9, 9, device=backend.device), A.new_ones(9))


def test_vectors_and_broadcast_batches_follow_torch(backend: Backend) -> None:
    sizes = [
        ((5, 5), (5,)),
        ((5, 5), (7, 5, 2)),
        ((7, 5, 5), (5, 2)),
        ((7, 5, 5), (7, 5)),
        ((7, 5, 5), (5,)),
        ((1, 7, 5, 5), (3, 7, 5, 1)),
        ((2, 1, 3, 5, 5), (4, 1, 5, 2)),
        ((5, 5, 5), (5, 5)),
        ((1, 5, 5), (0, 5, 2)),
    ]
    for size, right in sizes:
        A, _ = _systems(backend, size[:-2], 5, 1)
        B = backend.randn(*right)
        X, info = metalcore.solve(A, B, check=False)
        truth, expected = torch.linalg.solve_ex(A.cpu().double(), B.cpu().double())
        assert error(X, truth) <= tolerance("solve", torch.float32, 5)
        assert torch.equal(info.cpu(), expected)


def test_matrices_that_share_right_sides_are_factored_once() -> None:
    A, B = torch.randn(4, 1, 6, 6), torch.randn(50, 6, 2)
    with metalcore.trace() as t:
        metalcore.solve(A, B)
    assert t.records[0].shape == (4, 6, 6)


def test_paths_of_the_cpu_kernel() -> None:
    device, found = Backend("cpu"), []
    for batch, n in ((20, 16), (1, 16), (20, 140), (1, 70)):
        with metalcore.trace() as t:
            torch.ops.metalcore.solve(*_systems(device, (batch,), n, 2), False)
        found.append(t.records[0].variant)
    assert found == ["interleaved", "interleaved", "lapack", "lapack"]


def test_tiny_pivots_do_not_overflow() -> None:
    A, B = torch.randn(20, 6, 6), torch.randn(20, 6, 2)
    A[3] *= 1e-40
    B[3] *= 1e-40
    X = metalcore.solve(A, B)
    truth = torch.linalg.solve(A.double(), B.double())
    assert X.isfinite().all()
    assert error(X[3], truth[3]) < 1e-2


def test_results_do_not_depend_on_threads_or_neighbours() -> None:
    A, B = torch.randn(203, 12, 12), torch.randn(203, 12, 3)
    X = metalcore.solve(A, B)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    assert torch.equal(metalcore.solve(A, B), X)
    torch.set_num_threads(before)
    assert torch.equal(metalcore.solve(A[5:55], B[5:55]), X[5:55])


def test_registration() -> None:
    A, B = _systems(Backend("cpu"), (2,), 3, 2)
    check_registration("solve", (A, B, False))


def test_compile_and_vmap() -> None:
    A, B = _systems(Backend("cpu"), (6, 3), 5, 2)
    compiled = torch.compile(metalcore.solve, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(A, B), metalcore.solve(A, B))
    torch.testing.assert_close(torch.func.vmap(metalcore.solve)(A, B), metalcore.solve(A, B))
    shared = torch.func.vmap(metalcore.solve, in_dims=(None, 0))(A[0], B)
    torch.testing.assert_close(shared, metalcore.solve(A[0], B))


A3, B3 = torch.randn(3, 4, 4), torch.randn(3, 4, 2)
BAD = [
    (
        lambda: metalcore.solve(A3[:, :3], B3),
        ValueError,
        "solve: A must be square matrices [..., N, N], got [3, 3, 4]",
    ),
    (
        lambda: metalcore.solve(A3, B3[:, :3]),
        ValueError,
        "solve: B must be [..., 4, K] or [..., 4] with batch dimensions that broadcast with those "
        "of A; got A [3, 4, 4] and B [3, 3, 2]",
    ),
    (
        lambda: metalcore.solve(A3, B3.double()),
        TypeError,
        "solve: all of these must have one dtype, got A float32 and B float64; convert with .to()",
    ),
    (
        lambda: metalcore.solve(A3.long(), B3),
        TypeError,
        "solve: A must be float32, float64, float16 or bfloat16, got int64; "
        "convert it with A.float()",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[b[2][:40] for b in BAD])
def test_bad_input_is_named(call, kind, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message
