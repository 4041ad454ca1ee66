# SPDX-License-Identifier: MIT
"""Solution of A X = B by LU factors with partial pivoting."""

from typing import Any

import torch
from torch import Tensor

from metalcore._accuracy import set_accuracy
from metalcore._check import (
    expect_factored,
    expect_float,
    expect_same_device,
    expect_same_dtype,
    expect_square,
    expect_systems,
)
from metalcore._op import Example, Op, accumulate
from metalcore._route import Matrices
from metalcore.ops.linalg._precision import doubled, is_double
from metalcore.ops.linalg._systems import are_vectors, as_one_batch, as_right_sides

_route = Matrices("solve", lambda A: (A, A[..., :1]), square=True)
set_accuracy("solve", 8.0)
forward = Op(
    "solve(Tensor A, Tensor B, bool refine) -> (Tensor X, Tensor info)",
    batched=True,
    sharding="*NN, *Nk -> *Nk, *",
)


def solve(
    A: Tensor,
    B: Tensor,
    *,
    refine: bool = False,
    check: bool = True,
    precision: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """X with A X = B for each matrix of a batch, by Gaussian elimination with partial pivoting.

    Args:
        A: square matrices, [..., N, N].
        B: right sides, [..., N, K], or vectors [..., N] where `torch.linalg.solve` takes them as
            such: B has one dimension, or the shape of A without its last one. Batches broadcast.
        refine: also solve for what is left of B - A X in higher precision, and add the solution.
            In float32 X is then right to the last bits as long as A is not nearly singular.
        check: raise where A is singular. Without it nothing waits for the result.
        precision: `"float64"` computes and returns float64: on a GPU, which has none, a
            `metalcore.precise.DoubleFloat` of 48 bits.

    Returns:
        X, of B's shape and layout, and the batch of both; with `check=False` also info [...]
        (int32): 0, or the number of the first pivot that is zero.

    Example:
        >>> X = metalcore.solve(torch.randn(500, 16, 16), torch.randn(500, 16, 4))
    """
    if is_double(precision, A, B):
        return _in_float64(precision, A, B, check)  # type: ignore[no-any-return]
    expect_float("solve", A=A, B=B)
    expect_same_dtype("solve", A=A, B=B)
    expect_same_device("solve", A=A, B=B)
    expect_square("solve", "A", A)
    vectors = are_vectors(A, B)
    right = B.unsqueeze(-1) if vectors else B
    expect_systems("solve", A, right, given=B)
    if not refine and _route.prefers_torch(A, right):
        X, info = _route.by_torch(torch.linalg.solve_ex, A, right)
    elif A.shape[:-2] == right.shape[:-2]:
        X, info = forward(A, right, refine)
    else:
        X, info = _broadcast(A, right, refine)
    if vectors:
        X = X.squeeze(-1)
    if not check:
        return X, info
    way_out = "Use metalcore.lstsq or metalcore.pinv for singular matrices."
    expect_factored("solve", info, "linalg.solve", way_out)
    return X  # type: ignore[no-any-return]


def _in_float64(precision: str | None, A: Tensor, B: Tensor, check: bool) -> Any:
    double, A, B = doubled("solve", precision, A=A, B=B)
    if double is None:
        return solve(A, B, check=check)
    expect_square("solve", "A", A)
    A, B, vectors = as_one_batch("solve", A, B)
    found = double.solve("solve", A, B, check)
    if check:
        return found.squeeze(-1) if vectors else found
    return (found[0].squeeze(-1) if vectors else found[0]), found[1]


def _broadcast(A: Tensor, B: Tensor, refine: bool) -> tuple[Tensor, Tensor]:
    """Right sides that share a matrix become columns of one system: it is factored once."""
    batch = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
    own = (1,) * (len(batch) + 2 - A.dim()) + A.shape[:-2]
    shared = [d for d, (a, b) in enumerate(zip(own, batch, strict=True)) if a == 1 < b]
    kept = [b for d, b in enumerate(batch) if d not in shared]
    # [kept, N, shared, K]
    moved = list(range(-1 - len(shared), -1))
    columns = B.expand(*batch, *B.shape[-2:]).movedim(shared, moved)
    matrices = A.reshape(*own, *A.shape[-2:]).squeeze(shared).expand(*kept, *A.shape[-2:])
    X, info = forward(matrices, columns.flatten(-1 - len(shared)), refine)
    X = X.view(columns.shape).movedim(moved, shared)
    # of an empty batch, the matrices that it would have had are not known to be singular
    return X, info.reshape(A.shape[:-2]) if info.numel() else info.new_zeros(A.shape[:-2])


@forward.reference
def _(A: Tensor, B: Tensor, refine: bool) -> tuple[Tensor, Tensor]:
    X, info = torch.linalg.solve_ex(accumulate(A), accumulate(B))
    return as_right_sides(X, B), info


def _well_conditioned(batch: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    A = (torch.randn(batch, n, n) / n**0.5 + 2 * torch.eye(n)).roll(n // 2, -2)
    return A.to(dtype), torch.randn(batch, n, k).to(dtype)


@forward.example
def _(dtype: torch.dtype) -> Example:
    return Example((*_well_conditioned(5, 9, 17, dtype), False), reduces_over=9)


@forward.example
def _(dtype: torch.dtype) -> Example:
    return Example((*_well_conditioned(1, 40, 33, dtype), False), reduces_over=40)


@forward.example
def _(dtype: torch.dtype) -> Example:
    return Example((*_well_conditioned(2, 9, 3, dtype), True), reduces_over=9)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    A, _, ctx.refine = inputs
    ctx.save_for_backward(A, output[0])


@forward.gradient(save=_save)
def _(ctx: Any, dX: Tensor, _info: Any) -> Any:
    A, X = ctx.saved_tensors
    dB = forward(A.mT, dX, ctx.refine)[0]
    dA = None
    if ctx.needs_input_grad[0]:
        dA = -(accumulate(dB) @ accumulate(X).mT).to(A.dtype)
    return dA, dB, None
