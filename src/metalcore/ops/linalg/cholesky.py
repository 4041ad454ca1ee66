# SPDX-License-Identifier: MIT
"""Cholesky factor of symmetric positive definite matrices: A = L L^T, or A = U^T U."""

from typing import Any

import torch
from torch import Tensor

from metalcore._check import LinAlgError, expect_factored, expect_float, expect_square, explain
from metalcore._op import Example, Op, accumulate, unwatched

_WAY_OUT = "Add a multiple of the identity to A."

_forward = Op("cholesky(Tensor A, bool upper) -> (Tensor L, Tensor info)", batched=True)


def cholesky(
    A: Tensor, *, upper: bool = False, check: bool = True
) -> Tensor | tuple[Tensor, Tensor]:
    """Cholesky factor of each matrix of a batch. Only the lower triangle of A is read (with
    `upper` the upper one).

    Args:
        A: symmetric positive definite, [..., N, N].
        upper: return U with A = U^T U in place of L with A = L L^T.
        check: raise where A is not positive definite. Without it nothing waits for the result.

    Returns:
        The factor [..., N, N]; with `check=False` also info [...] (int32): 0, or the order of the
        leading minor that is not positive definite.

    Example:
        >>> L = metalcore.cholesky(A @ A.mT + torch.eye(8))
    """
    if check and unwatched() and _torch_is_ahead(A):
        try:
            return torch.linalg.cholesky(A, upper=upper)  # type: ignore[no-any-return]
        except LinAlgError as error:
            explain("cholesky", error, _WAY_OUT)
    expect_float("cholesky", A=A)
    expect_square("cholesky", "A", A)
    factor, info = _forward(A, upper)
    if not check:
        return factor, info
    expect_factored("cholesky", info, "linalg.cholesky", _WAY_OUT)
    return factor  # type: ignore[no-any-return]


def _torch_is_ahead(A: Tensor) -> bool:
    """For one matrix, or a few: they would leave lanes idle."""
    return (
        A.dim() == 2
        and A.device.type == "cpu"
        and A.dtype in (torch.float32, torch.float64)
        and A.shape[0] == A.shape[1] > 4
    )


@_forward.reference
def _(A: Tensor, upper: bool) -> tuple[Tensor, Tensor]:
    factor, info = torch.linalg.cholesky_ex(accumulate(A), upper=upper)
    return factor.to(A.dtype).contiguous(), info


@_forward.example
def _(dtype: torch.dtype) -> Example:
    x = torch.randn(5, 9, 9)
    return Example(((x @ x.mT / 9 + torch.eye(9)).to(dtype), False), reduces_over=9)


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
    inner = torch.linalg.solve_triangular(L.mT, inner, upper=True)
    dA = torch.linalg.solve_triangular(L, inner, upper=False, left=False) / 2
    return dA.to(factor.dtype), None
