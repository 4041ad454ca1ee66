# SPDX-License-Identifier: MIT
"""Cholesky factor of symmetric positive definite matrices: A = L L^T, or A = U^T U."""

from typing import Any

import torch
from torch import Tensor

from metalcore._check import (
    LAPACK_TYPES,
    LinAlgError,
    expect_factored,
    expect_float,
    expect_square,
    explain,
)
from metalcore._op import Example, Op, accumulate
from metalcore._policy import policy
from metalcore._trace import left_to_torch
from metalcore.ops.linalg.trsm import trsm

_LARGEST = policy("cholesky", "cpu")["interleaved_up_to"]
_FEW: int = policy("cholesky", "cpu")["torch_below"]
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
    if (
        check
        and (A.ndim == 2 or A.numel() < _FEW or _torch_is_ahead(A))
        and A.dtype in LAPACK_TYPES
        and left_to_torch("cholesky", A)
    ):
        try:
            # to name an argument takes 1 us
            if upper:
                return torch.linalg.cholesky(A, upper=True)  # type: ignore[no-any-return]
            return torch.linalg.cholesky(A)  # type: ignore[no-any-return]
        except LinAlgError as error:
            explain("cholesky", error, _WAY_OUT)
        except RuntimeError:
            expect_square("cholesky", "A", A)
            raise
    expect_float("cholesky", A=A)
    expect_square("cholesky", "A", A)
    factor, info = _forward(A, upper)
    if not check:
        return factor, info
    expect_factored("cholesky", info, "linalg.cholesky", _WAY_OUT)
    return factor  # type: ignore[no-any-return]


def _torch_is_ahead(A: Tensor) -> bool:
    """For single and for large matrices, and where our call takes longer than torch does for all of
    them: in torch's time the call is worth 4500 values, and a group of lanes 1.5 matrices (AMD
    EPYC, one thread)."""
    size = A.shape
    n = size[-1] if len(size) > 1 else 0
    return n > 0 and (A.numel() < 4500 + n * n * 3 // 2 or n > _LARGEST)


@_forward.reference
def _(A: Tensor, upper: bool) -> tuple[Tensor, Tensor]:
    factor, info = torch.linalg.cholesky_ex(accumulate(A), upper=upper)
    return factor.to(A.dtype).contiguous(), info


def _example(dtype: torch.dtype, batch: int, n: int) -> Example:
    x = torch.randn(batch, n, n)
    return Example(((x @ x.mT / n + torch.eye(n)).to(dtype), False), reduces_over=n)


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
