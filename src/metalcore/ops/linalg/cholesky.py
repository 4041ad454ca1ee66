# SPDX-License-Identifier: MIT
"""Cholesky factor of symmetric positive definite matrices: A = L L^T, or A = U^T U."""

from typing import Any

import torch
from torch import Tensor

from metalcore._accuracy import set_accuracy
from metalcore._check import expect_factored, expect_float, expect_square
from metalcore._op import Example, Op, accumulate
from metalcore._route import Matrices
from metalcore.ops.linalg._precision import doubled, is_double
from metalcore.ops.linalg.trsm import trsm

_route = Matrices("cholesky", lambda A: (_positive_definite(A),), square=True)
set_accuracy("cholesky", 8.0)

_forward = Op(
    "cholesky(Tensor A, bool upper) -> (Tensor L, Tensor info)",
    batched=True,
    sharding="*NN -> *NN, *",
)


def cholesky(
    A: Tensor, *, upper: bool = False, check: bool = True, precision: str | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Cholesky factor of each matrix of a batch. Only the lower triangle of A is read (with
    `upper` the upper one).

    Args:
        A: symmetric positive definite, [..., N, N].
        upper: return U with A = U^T U in place of L with A = L L^T.
        check: raise where A is not positive definite. Without it nothing waits for the result.
        precision: `"float64"` computes and returns float64: on a GPU, which has none, a
            `metalcore.precise.DoubleFloat` of 48 bits.

    Returns:
        The factor [..., N, N]; with `check=False` also info [...] (int32): 0, or the order of the
        leading minor that is not positive definite.

    Example:
        >>> L = metalcore.cholesky(A @ A.mT + torch.eye(8))
    """
    if is_double(precision, A):
        double, A = doubled("cholesky", precision, A=A)
        if double is not None:
            expect_square("cholesky", "A", A)
            return double.cholesky(A, upper, check)  # type: ignore[no-any-return]
    expect_float("cholesky", A=A)
    expect_square("cholesky", "A", A)
    if _route.prefers_torch(A):
        factor, info = _route.by_torch(torch.linalg.cholesky_ex, A, upper=upper)
    else:
        factor, info = _forward(A, upper)
    if not check:
        return factor, info
    way_out = "Add a multiple of the identity to A."
    expect_factored("cholesky", info, "linalg.cholesky", way_out)
    return factor  # type: ignore[no-any-return]


@_forward.reference
def _(A: Tensor, upper: bool) -> tuple[Tensor, Tensor]:
    factor, info = torch.linalg.cholesky_ex(accumulate(A), upper=upper)
    return factor.to(A.dtype).contiguous(), info


def _positive_definite(x: Tensor) -> Tensor:
    n = x.shape[-1]
    return x @ x.mT / n + torch.eye(n, dtype=x.dtype)


def _example(dtype: torch.dtype, batch: int, n: int) -> Example:
    A = _positive_definite(torch.randn(batch, n, n))
    return Example((A.to(dtype), False), reduces_over=n)


@_forward.example
def _(dtype: torch.dtype) -> Example:
    return _example(dtype, 5, 9)


@_forward.example
def _(dtype: torch.dtype) -> Example:
    return _example(dtype, 1, 70)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, ctx.upper = inputs
    ctx.save_for_backward(output[0])


@_forward.gradient(save=_save)
def _(ctx: Any, dfactor: Tensor, _info: Any) -> Any:
    (factor,) = ctx.saved_tensors
    L, dL = (accumulate(x.mT if ctx.upper else x) for x in (factor, dfactor))
    # dA = L^-T sym(tril(L^T dL) with half its diagonal) L^-1
    inner = (L.mT @ dL).tril()
    inner = inner + inner.tril(-1).mT
    half = trsm(L, inner, transpose=True)
    dA = trsm(L, half.mT, transpose=True) / 2
    return dA.to(factor.dtype), None
