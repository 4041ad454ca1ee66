# SPDX-License-Identifier: MIT
"""Singular value decomposition: A = U diag(S) V^T, S descending."""

from typing import Any

import torch
from torch import Tensor

from metalcore._accuracy import set_accuracy
from metalcore._check import (
    LinAlgError,
    expect_factored,
    expect_float,
    expect_matrix,
    explain,
    is_clear,
)
from metalcore._op import Example, Op, accumulate
from metalcore._route import Matrices
from metalcore.ops.linalg._precision import doubled, is_double
from metalcore.ops.linalg._tall import svd_by_rows
from metalcore.ops.linalg.tsqr import is_split_by_rows

WAY_OUT = "Look for NaN and inf in A."

_route = Matrices("svd")
_values_route = Matrices("svdvals")
set_accuracy("svd", 8.0)

_forward = Op(
    "svd(Tensor A, bool full_matrices) -> (Tensor U, Tensor S, Tensor V, Tensor info)",
    batched=True,
    sharding="*MN -> *MK, *K, *NL, *",
)
_values = Op("svdvals(Tensor A) -> (Tensor S, Tensor info)", batched=True, sharding="*MN -> *K, *")
_solve = Op(
    "svd_solve(Tensor A, Tensor B, Tensor rcond) -> (Tensor X, Tensor S, Tensor rank, Tensor info)",
    batched=True,
    sharding="*MN, *MK, * -> *NK, *L, *, *",
)


def svd(
    A: Tensor,
    full_matrices: bool = False,
    compute_uv: bool = True,
    *,
    check: bool = True,
    precision: str | None = None,
) -> Any:
    """Singular value decomposition of each matrix of a batch: A = U diag(S) V^T.

    U and V have orthonormal columns, whatever the rank of A. Their gradient is that of torch: it
    needs singular values that differ, and ignores the columns that `full_matrices` adds.

    Args:
        A: [..., M, N].
        full_matrices: return all M columns of U and all N of V, not only the first min(M, N).
        compute_uv: without it U and V are None, and nothing is spent on them.
        check: raise for NaN in A; inf gives NaN. Without it nothing waits for the result.
        precision: `"float64"` computes and returns float64: on a GPU, which has none, a
            `metalcore.precise.DoubleFloat` of 48 bits.

    Returns:
        U [..., M, K], S [..., K] descending, V [..., N, K] (not its transpose), K = min(M, N); with
        `check=False` also info [...] (int32): 0, or not for matrices whose results are NaN.

    Example:
        >>> U, S, V = metalcore.svd(A)
        >>> A = U * S[..., None, :] @ V.mT
    """
    if not compute_uv:
        values = svdvals(A, check=check, precision=precision)
        return (None, values, None) if check else (None, values[0], None, values[1])
    if is_double(precision, A):
        double, A = doubled("svd", precision, A=A)
        if double is not None:
            expect_matrix("svd", "A", A)
            return double.svd(A, full_matrices, check)
    expect_float("svd", A=A)
    expect_matrix("svd", "A", A)
    if check and not full_matrices and is_split_by_rows(A):
        return svd_by_rows(A, svd)
    if check and _route.prefers_torch(A):
        return _route.by_torch(_decompose_by_torch, A, full_matrices)
    U, S, V, info = _forward(A, full_matrices)
    if not check:
        return U, S, V, info
    expect_decomposed("svd", A, info)
    return U, S, V


def svdvals(A: Tensor, *, check: bool = True, precision: str | None = None) -> Any:
    """Singular values of each matrix of a batch.

    Args:
        A: [..., M, N].
        check: raise for NaN in A; inf gives NaN. Without it nothing waits for the result.
        precision: `"float64"` computes and returns float64: on a GPU, which has none, a
            `metalcore.precise.DoubleFloat` of 48 bits.

    Returns:
        S [..., min(M, N)], descending; with `check=False` also info, as `svd` returns it.

    Example:
        >>> S = metalcore.svdvals(A)
    """
    if is_double(precision, A):
        double, A = doubled("svdvals", precision, A=A)
        if double is not None:
            expect_matrix("svdvals", "A", A)
            _, S, _, *info = double.svd(A, False, check)
            return S if check else (S, *info)
    expect_float("svdvals", A=A)
    expect_matrix("svdvals", "A", A)
    if check and _values_route.prefers_torch(A):
        return _values_route.by_torch(_values_by_torch, A)
    if torch.is_grad_enabled() and A.requires_grad:
        # the gradient needs the vectors
        _, S, _, info = _forward(A, False)
    else:
        S, info = _values(A)
    if not check:
        return S, info
    expect_decomposed("svdvals", A, info)
    return S


def counting(S: Tensor, rcond: float | Tensor) -> Tensor:
    """Which singular values are more than `rcond` times the largest, the first; rcond is a number
    or [..., 1]."""
    return rcond * S[..., :1] < S


def inverted(S: Tensor, rcond: float | Tensor) -> Tensor:
    """1 / S where S counts, else 0."""
    return torch.where(counting(S, rcond), 1 / S, torch.zeros_like(S))


def svd_solve(op: str, A: Tensor, B: Tensor, rcond: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """X of smallest norm with ||A X - B|| smallest, and the singular values and rank of A.

    Args:
        op: the name in errors.
        A: [..., M, N].
        B: [..., M, K].
        rcond: [...]: singular values up to this times the largest count as zero.

    Returns:
        X [..., N, K], S [..., min(M, N)], descending, and the rank [...]. An error for NaN in A.

    Example:
        >>> X, S, rank = svd_solve("lstsq", A, B, torch.full(A.shape[:-2], 1e-6))
    """
    X, S, rank, info = _solve(A, B, rcond)
    expect_decomposed(op, A, info)
    return X, S, rank


def _decompose_by_torch(A: Tensor, full_matrices: bool) -> tuple[Tensor, Tensor, Tensor]:
    """torch's svd, which is up to twice as fast for long matrices as for wide ones."""
    try:
        if A.shape[-2] >= A.shape[-1]:
            U, S, Vh = torch.linalg.svd(A, full_matrices)
            return U, S, Vh.mT
        V, S, Uh = torch.linalg.svd(A.mT, full_matrices)
        return Uh.mT, S, V
    except LinAlgError as error:
        explain("svd", error, WAY_OUT)


def _values_by_torch(A: Tensor) -> Tensor:
    try:
        S: Tensor = torch.linalg.svdvals(A.mT if A.shape[-2] < A.shape[-1] else A)
    except LinAlgError as error:
        explain("svdvals", error, WAY_OUT)
    return S


def expect_decomposed(op: str, A: Tensor, info: Tensor) -> None:
    """As torch does: an error for NaN in A, and NaN in the results for inf."""
    if is_clear(info):
        return
    has_nan = A.isnan().flatten(-2).any(-1)
    expect_factored(op, info * (has_nan | (info > 0)), "linalg.svd", WAY_OUT)


@_forward.reference
def _(A: Tensor, full_matrices: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    U, S, Vh = torch.linalg.svd(accumulate(A), full_matrices=full_matrices)
    info = torch.zeros(A.shape[:-2], dtype=torch.int32, device=A.device)
    U, S, V = (x.to(A.dtype).contiguous() for x in (U, S, Vh.mT))
    return U, S, V, info


@_values.reference
def _(A: Tensor) -> tuple[Tensor, Tensor]:
    S = torch.linalg.svdvals(accumulate(A))
    return S.to(A.dtype), torch.zeros(A.shape[:-2], dtype=torch.int32, device=A.device)


@_solve.reference
def _(A: Tensor, B: Tensor, rcond: Tensor) -> tuple[Tensor, ...]:
    U, S, V, info = _forward.meaning(accumulate(A), False)
    limit = accumulate(rcond)[..., None]
    X = V @ (inverted(S, limit)[..., None] * (U.mT @ accumulate(B)))
    return X.to(A.dtype), S.to(A.dtype), counting(S, limit).sum(-1), info


@_forward.example
def _(dtype: torch.dtype) -> Example:
    return Example((torch.randn(5, 6, 8).to(dtype), False), reduces_over=8)


@_forward.example
def _(dtype: torch.dtype) -> Example:
    # rank 3: the rest of V is to be completed
    A = torch.randn(2, 5, 5) * torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
    return Example((A.to(dtype), False), reduces_over=5)


@_forward.example
def _(dtype: torch.dtype) -> Example:
    return Example((torch.randn(1, 34, 4).to(dtype), True), reduces_over=34)


@_forward.example
def _(dtype: torch.dtype) -> Example:
    # rank 1: most of V is to be completed
    return Example(((torch.randn(1, 33, 1) @ torch.randn(1, 33)).to(dtype), False), reduces_over=33)


@_forward.example
def _(dtype: torch.dtype) -> Example:
    return Example(((torch.randn(1, 65, 1) @ torch.randn(1, 65)).to(dtype), False), reduces_over=65)


@_values.example
def _(dtype: torch.dtype) -> Example:
    return Example((torch.randn(5, 9, 6).to(dtype),), reduces_over=9)


@_solve.example
def _(dtype: torch.dtype) -> Example:
    # far from singular: the solution is as exact as the decomposition
    A = torch.randn(5, 9, 6) + 9 * torch.eye(9, 6)
    return Example((A.to(dtype), torch.randn(5, 9, 2).to(dtype), torch.zeros(5).to(dtype)), 9)


@_forward.determines
def _(U: Tensor, S: Tensor, V: Tensor, info: Tensor) -> tuple[Tensor, ...]:
    """The product, the values, and that the vectors are orthonormal."""
    U, S, V = (accumulate(x) for x in (U, S, V))
    k = S.shape[-1]
    return (U[..., :k] * S[..., None, :]) @ V[..., :k].mT, S, U.mT @ U, V.mT @ V


@_values.determines
def _(S: Tensor, info: Tensor) -> tuple[Tensor, ...]:
    return (S,)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[:3])


@_forward.gradient(save=_save)
def _(ctx: Any, dU: Tensor, dS: Tensor, dV: Tensor, _info: Any) -> Any:
    factors = ctx.saved_tensors
    U, S, V, dU, dS, dV = (accumulate(x) for x in (*factors, dU, dS, dV))
    k = S.shape[-1]
    # columns past k are any basis of what is left: nothing may depend on them
    U, V, dU, dV = (x[..., :k] for x in (U, V, dU, dV))
    row, column = S[..., None, :], S[..., :, None]
    gaps = (row - column) * (row + column)
    gaps = gaps + torch.eye(k, dtype=S.dtype, device=S.device)
    UdU, VdV = U.mT @ dU, V.mT @ dV
    inner = (UdU - UdU.mT) / gaps * row + column * ((VdV - VdV.mT) / gaps)
    dA = U @ (inner + torch.diag_embed(dS)) @ V.mT
    # what moves the space of the columns itself
    if U.shape[-2] > k:
        dA = dA + (dU - U @ UdU) / row @ V.mT
    if V.shape[-2] > k:
        dA = dA + U / row @ (dV - V @ VdV).mT
    return dA.to(factors[0].dtype), None


def _save_values(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs)


_solve.differentiate_reference()


@_values.gradient(save=_save_values)
def _(ctx: Any, dS: Tensor, _info: Any) -> Any:
    (A,) = ctx.saved_tensors
    U, _, V, _ = _forward(A, False)
    return ((accumulate(U) * accumulate(dS)[..., None, :]) @ accumulate(V).mT).to(A.dtype)
