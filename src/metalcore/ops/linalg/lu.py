# SPDX-License-Identifier: MIT
"""LU factors with partial pivoting: A = P L U."""

from typing import Any

import torch
from torch import Tensor

from metalcore._accuracy import set_accuracy
from metalcore._check import expect_float, expect_matrix
from metalcore._op import Example, Op, accumulate
from metalcore._route import Matrices

_route = Matrices("lu")
set_accuracy("lu", 8.0)

_forward = Op(
    "lu(Tensor A) -> (Tensor P, Tensor L, Tensor U)", batched=True, sharding="*MN -> *MM, *MK, *KN"
)


def lu(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """P, L and U of each matrix of a batch, as `torch.linalg.lu` gives them: A = P L U.

    Args:
        A: [..., M, N]; may be singular.

    Returns:
        P [..., M, M], a permutation; L [..., M, K], unit lower triangular with no value over 1; U
        [..., K, N], upper triangular; K is the smaller of M and N.

    Example:
        >>> P, L, U = metalcore.lu(torch.randn(200, 32, 32))
    """
    expect_float("lu", A=A)
    expect_matrix("lu", "A", A)
    if _route.prefers_torch(A):
        return _route.by_torch(torch.linalg.lu, A)  # type: ignore[no-any-return]
    return _forward(A)  # type: ignore[no-any-return]


@_forward.reference
def _(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    P, L, U = (x.to(A.dtype).contiguous() for x in torch.linalg.lu(accumulate(A)))
    return P, L, U


@_forward.determines
def _(P: Tensor, L: Tensor, U: Tensor) -> tuple[Tensor, ...]:
    # of ones and zeros, with no gradient
    return L, U, P.long()


@_forward.example
def _(dtype: torch.dtype) -> Example:
    return Example((torch.randn(5, 9, 7).to(dtype),), reduces_over=9)


@_forward.example
def _(dtype: torch.dtype) -> Example:
    return Example((torch.randn(1, 40, 33).to(dtype),), reduces_over=40)


@_forward.example
def _(dtype: torch.dtype) -> Example:
    return Example((torch.randn(1, 70, 68).to(dtype),), reduces_over=70)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[0])
    ctx.save_for_backward(*output)


@_forward.gradient(save=_save)
def _(ctx: Any, _P: Any, dL: Tensor, dU: Tensor) -> Any:
    factors = ctx.saved_tensors
    P, L, U, dL, dU = (accumulate(x) for x in (*factors, dL, dU))
    k = L.shape[-1]
    # Square parts L1 and U1, and what is below or right of them: P^T A = [L1; L2] [U1 U2].
    L1, L2, U1, U2 = L[..., :k, :], L[..., k:, :], U[..., :k], U[..., k:]
    dL1, dL2, dU1, dU2 = dL[..., :k, :], dL[..., k:, :], dU[..., :k], dU[..., k:]
    # L1^T dL1 - dU2 U2^T acts on L1, dU1 U1^T - L2^T dL2 on U1
    inner = (L1.mT @ dL1 - dU2 @ U2.mT).tril(-1) + (dU1 @ U1.mT - L2.mT @ dL2).triu()
    left = torch.linalg.solve_triangular(L1.mT, inner, upper=True, unitriangular=True)
    d1 = torch.linalg.solve_triangular(U1.mT, left, upper=False, left=False)
    d2 = torch.linalg.solve_triangular(L1.mT, dU2, upper=True, unitriangular=True)
    d3 = torch.linalg.solve_triangular(U1.mT, dL2, upper=False, left=False)
    dPA = torch.cat([torch.cat([d1, d2], -1), d3], -2) if L2.shape[-2] else torch.cat([d1, d2], -1)
    return (P @ dPA).to(factors[0].dtype)
