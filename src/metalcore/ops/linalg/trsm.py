# SPDX-License-Identifier: MIT
"""Triangular systems: op(A) X = B, where op(A) is A or its transpose."""

from typing import Any

import torch
from torch import Tensor

from metalcore._check import (
    LAPACK_TYPES,
    expect_float,
    expect_same_device,
    expect_same_dtype,
    expect_square,
)
from metalcore._op import Example, Op, accumulate
from metalcore._policy import policy
from metalcore._trace import left_to_torch
from metalcore.ops.linalg._systems import are_usual, are_vectors, as_one_batch

_KNOBS = policy("trsm", "cpu")
# Right sides and matrices that are left to torch without a look at their shapes.
_FEW: int = _KNOBS["torch_below"]
_SMALL: int = _KNOBS["torch_below_matrix"]

_forward = Op(
    "trsm(Tensor A, Tensor B, bool lower, bool transpose, bool unit_diagonal) -> Tensor",
    batched=True,
)


def trsm(
    A: Tensor,
    B: Tensor,
    lower: bool = True,
    transpose: bool = False,
    unit_diagonal: bool = False,
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

    Returns:
        X, [..., N, K] or [..., N].

    Example:
        >>> x = metalcore.trsm(metalcore.cholesky(A), b)
    """
    vectors = A.ndim != B.ndim and are_vectors(A, B)
    if (
        ((B.numel() < _FEW and A.numel() < _SMALL) or _torch_is_ahead(A, B, vectors))
        and A.dtype is B.dtype
        and B.dtype in LAPACK_TYPES
        and left_to_torch("trsm", B)
    ):
        a, b = A.mT if transpose else A, B.unsqueeze(-1) if vectors else B
        try:
            # to name one argument more takes 1 us
            X: Tensor = (
                torch.linalg.solve_triangular(a, b, upper=lower == transpose, unitriangular=True)
                if unit_diagonal
                else torch.linalg.solve_triangular(a, b, upper=lower == transpose)
            )
        except RuntimeError:
            _as_systems(A, B)
            raise
    else:
        if not are_usual(A, B):
            A, B = _as_systems(A, B)
        X = _forward(A, B, lower, transpose, unit_diagonal)
    return X.squeeze(-1) if vectors else X


def _as_systems(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Check, and bring both to the same batch."""
    expect_float("trsm", A=A, B=B)
    expect_same_dtype("trsm", A=A, B=B)
    expect_same_device("trsm", A=A, B=B)
    expect_square("trsm", "A", A)
    return as_one_batch("trsm", A, B)


def _torch_is_ahead(A: Tensor, B: Tensor, vectors: bool) -> bool:
    """Where our call takes longer than torch does for all systems, and for few right sides of
    large systems. For torch, a system is 320 products and the sums of these, and our call 60000
    (AMD EPYC, one thread)."""
    a, b = A.shape, B.shape
    n = a[-1] if len(a) > 1 else 0
    return n > 0 and (
        B.numel() * (n + 320 // n) < 60000
        or (n > (64 if len(a) == 2 else 128) and (vectors or b[-1] < 8))
    )


@_forward.reference
def _(A: Tensor, B: Tensor, lower: bool, transpose: bool, unit_diagonal: bool) -> Tensor:
    a, b = accumulate(A), accumulate(B)
    X: Tensor = torch.linalg.solve_triangular(
        a.mT if transpose else a, b, upper=lower == transpose, unitriangular=unit_diagonal
    )
    return X.to(B.dtype).contiguous()


def _example(dtype: torch.dtype, k: int) -> Example:
    A = torch.randn(5, 9, 9) / 9 + 2 * torch.eye(9)
    return Example((A.to(dtype), torch.randn(5, 9, k).to(dtype), True, False, False), 9)


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
