# SPDX-License-Identifier: MIT
"""Systems A X = B with positive definite A, by its Cholesky factor."""

from typing import Any

import torch
from torch import Tensor

from metalcore._accuracy import set_accuracy
from metalcore._check import (
    expect_float,
    expect_matrix,
    expect_same_device,
    expect_same_dtype,
    expect_square,
    expect_systems,
)
from metalcore._op import Example, Op, accumulate
from metalcore._route import Systems
from metalcore.ops.linalg._systems import as_right_sides, broadcast
from metalcore.ops.linalg.trsm import well_conditioned

_route = Systems("cholesky_solve", "", lambda B: (B, well_conditioned(B).tril()))
set_accuracy("cholesky_solve", 16.0)

_forward = Op(
    "cholesky_solve(Tensor B, Tensor L, bool upper) -> Tensor",
    batched=True,
    sharding="*Nk, *NN -> *Nk",
)


def cholesky_solve(B: Tensor, L: Tensor, *, upper: bool = False) -> Tensor:
    """Solve A X = B, given the Cholesky factor of A. Only the lower triangle of L is read (with
    `upper` the upper one).

    Args:
        B: right sides, [..., N, K]. Batch dimensions broadcast.
        L: factor of A = L L^T, [..., N, N], as `cholesky` returns it.
        upper: L is U with A = U^T U.

    Returns:
        X, [..., N, K].

    Example:
        >>> X = metalcore.cholesky_solve(B, metalcore.cholesky(A))
    """
    expect_float("cholesky_solve", B=B, L=L)
    expect_same_dtype("cholesky_solve", B=B, L=L)
    expect_same_device("cholesky_solve", B=B, L=L)
    expect_matrix("cholesky_solve", "B", B)
    expect_square("cholesky_solve", "L", L)
    expect_systems("cholesky_solve", L, B, "L")
    L, B = broadcast(L, B)
    if _route.prefers_torch(B, L):
        return _route.by_torch(torch.cholesky_solve, B, L, upper)
    return _forward(B, L, upper)  # type: ignore[no-any-return]


@_forward.reference
def _(B: Tensor, L: Tensor, upper: bool) -> Tensor:
    factor = accumulate(L).triu() if upper else accumulate(L).tril()
    return as_right_sides(torch.cholesky_solve(accumulate(B), factor, upper), B)


def _example(dtype: torch.dtype, k: int) -> Example:
    B = torch.randn(5, 9, k)
    return Example((B.to(dtype), well_conditioned(B).to(dtype), False), 9)


@_forward.example
def _(dtype: torch.dtype) -> Example:
    return _example(dtype, 3)


@_forward.example
def _(dtype: torch.dtype) -> Example:
    return _example(dtype, 17)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, L, ctx.upper = inputs
    ctx.save_for_backward(L, output)


@_forward.gradient(save=_save)
def _(ctx: Any, dX: Tensor) -> Any:
    L, X = ctx.saved_tensors
    dB = _forward(dX, L, ctx.upper)
    dL = None
    if ctx.needs_input_grad[1]:
        # dA = -dB X^T, and A = L L^T
        both = accumulate(dB) @ accumulate(X).mT
        both = both + both.mT
        factor = accumulate(L)
        dL = (factor.triu() @ both).triu() if ctx.upper else (both @ factor.tril()).tril()
        dL = -dL.to(L.dtype)
    return dB, dL, None
