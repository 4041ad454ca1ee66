# SPDX-License-Identifier: MIT
"""Triangular systems: op(A) X = B, where op(A) is A or its transpose."""

from typing import Any

import torch
from torch import Tensor

from metalcore._accuracy import set_accuracy
from metalcore._check import expect_float, expect_same_device, expect_same_dtype, expect_square
from metalcore._op import Example, Op, accumulate
from metalcore._route import Systems
from metalcore.ops.linalg._precision import doubled, is_double
from metalcore.ops.linalg._systems import as_one_batch, as_right_sides

_route = Systems("trsm", "", lambda B: (well_conditioned(B).tril(), B))
set_accuracy("trsm", 8.0)

_forward = Op(
    "trsm(Tensor A, Tensor B, bool lower, bool transpose, bool unit_diagonal) -> Tensor",
    batched=True,
    sharding="*NN, *Nk -> *Nk",
)


def trsm(
    A: Tensor,
    B: Tensor,
    lower: bool = True,
    transpose: bool = False,
    unit_diagonal: bool = False,
    *,
    precision: str | None = None,
) -> Tensor:
    """Solve op(A) X = B with triangular A. Only the triangle of A that `lower` names is read.
    A zero on the diagonal gives inf or NaN, as a division by it does.

    Args:
        A: [..., N, N].
        B: right sides, [..., N, K]; or vectors [..., N], which is what B is if it has one dimension
            or the shape of A without its last dimension. Batch dimensions broadcast.
        lower: A is lower triangular, else upper.
        transpose: op(A) is the transpose of A.
        unit_diagonal: take the diagonal of A as ones, without reading it.
        precision: `"float64"` computes and returns float64: on a GPU, which has none, a
            `metalcore.precise.DoubleFloat` of 48 bits.

    Returns:
        X, [..., N, K] or [..., N].

    Example:
        >>> x = metalcore.trsm(metalcore.cholesky(A), b)
    """
    if is_double(precision, A, B):
        double, A, B = doubled("trsm", precision, A=A, B=B)
        if double is not None:
            expect_square("trsm", "A", A)
            A, B, vectors = as_one_batch("trsm", A, B)
            found: Tensor = double.trsm(A, B, lower, transpose, unit_diagonal)
            return found.squeeze(-1) if vectors else found
    expect_float("trsm", A=A, B=B)
    expect_same_dtype("trsm", A=A, B=B)
    expect_same_device("trsm", A=A, B=B)
    expect_square("trsm", "A", A)
    A, B, vectors = as_one_batch("trsm", A, B)
    if _route.prefers_torch(B, A):
        X = _route.by_torch(_solve_by_torch, B, A, lower, transpose, unit_diagonal)
    else:
        X = _forward(A, B, lower, transpose, unit_diagonal)
    return X.squeeze(-1) if vectors else X


def _solve_by_torch(
    B: Tensor, A: Tensor, lower: bool, transpose: bool, unit_diagonal: bool
) -> Tensor:
    X: Tensor = torch.linalg.solve_triangular(
        A.mT if transpose else A, B, upper=lower == transpose, unitriangular=unit_diagonal
    )
    return X


@_forward.reference
def _(A: Tensor, B: Tensor, lower: bool, transpose: bool, unit_diagonal: bool) -> Tensor:
    X = _solve_by_torch(accumulate(B), accumulate(A), lower, transpose, unit_diagonal)
    return as_right_sides(X, B)


def well_conditioned(B: Tensor) -> Tensor:
    """Matrices A [..., N, N] for right sides B [..., N, K]."""
    n = B.shape[-2]
    return torch.randn(*B.shape[:-1], n, dtype=B.dtype) / n + 2 * torch.eye(n, dtype=B.dtype)


def _example(dtype: torch.dtype, k: int) -> Example:
    B = torch.randn(5, 9, k)
    return Example((well_conditioned(B).to(dtype), B.to(dtype), True, False, False), 9)


@_forward.example
def _(dtype: torch.dtype) -> Example:
    return _example(dtype, 3)


@_forward.example
def _(dtype: torch.dtype) -> Example:
    return _example(dtype, 17)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    A, _, ctx.lower, ctx.transpose, ctx.unit = inputs
    ctx.save_for_backward(A, output)


@_forward.gradient(save=_save)
def _(ctx: Any, dX: Tensor) -> Any:
    A, X = ctx.saved_tensors
    dB = _forward(A, dX, ctx.lower, not ctx.transpose, ctx.unit)
    dA = None
    if ctx.needs_input_grad[0]:
        # d op(A) = -dB X^T
        x, d = accumulate(X), accumulate(dB)
        dA = -(x @ d.mT if ctx.transpose else d @ x.mT)
        dA = dA.tril(-int(ctx.unit)) if ctx.lower else dA.triu(int(ctx.unit))
        dA = dA.to(A.dtype)
    return dA, dB, None, None, None
