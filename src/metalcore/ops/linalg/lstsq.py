# SPDX-License-Identifier: MIT
"""Least squares: the X of smallest norm among those that make ||A X - B|| smallest."""

from typing import NamedTuple

import torch
from torch import Tensor

from metalcore._check import expect_float, expect_matrix, expect_same_dtype
from metalcore._op import accumulate, has_data
from metalcore._route import Matrices
from metalcore.ops.linalg._precision import doubled, is_double
from metalcore.ops.linalg._systems import as_one_batch
from metalcore.ops.linalg._tall import lstsq_by_rows
from metalcore.ops.linalg.pinv import cutoff, pinv
from metalcore.ops.linalg.svd import counting, svd_solve, svdvals
from metalcore.ops.linalg.tsqr import is_split_by_rows

_route = Matrices("lstsq", lambda A: (A, A[..., :1]))


class LeastSquares(NamedTuple):
    """What `lstsq` returns."""

    solution: Tensor
    residuals: Tensor
    rank: Tensor
    singular_values: Tensor


def lstsq(
    A: Tensor,
    B: Tensor,
    rcond: float | Tensor | None = None,
    *,
    precision: str | None = None,
) -> LeastSquares:
    """Least squares solution of A X = B for each matrix of a batch, over- or underdetermined and of
    any rank.

    Args:
        A: [..., M, N].
        B: [..., M] or [..., M, K], of A's dtype; batch dimensions are broadcast.
        rcond: singular values up to this times the largest count as zero. Default max(M, N) times
            the machine epsilon.
        precision: `"float64"` computes and returns float64: on a GPU, which has none, a
            `metalcore.precise.DoubleFloat` of 48 bits. There A must
            have full rank, and there are no singular values.

    Returns:
        `solution` [..., N] or [..., N, K], `residuals` ||A X - B||^2 [...] or [..., K] (empty
        unless M > N and every matrix has rank N), `rank` [...] (int64) and `singular_values`
        [..., min(M, N)].

    Example:
        >>> X, residuals, rank, S = metalcore.lstsq(A, B)
    """
    if is_double(precision, A, B):
        return _in_float64(precision, A, B, rcond)
    expect_float("lstsq", A=A, B=B)
    expect_matrix("lstsq", "A", A)
    expect_same_dtype("lstsq", A=A, B=B)
    if is_split_by_rows(A) and B.dim() <= 2:
        return LeastSquares(*lstsq_by_rows(A, B, cutoff(A, rcond), lstsq))
    dtype = A.dtype
    A, B, vectors = as_one_batch("lstsq", accumulate(A), accumulate(B))
    M, N = A.shape[-2:]
    S: Tensor
    if B.numel() and not isinstance(rcond, Tensor) and _route.prefers_torch(A, B):
        found = _route.by_torch(torch.linalg.lstsq, A, B, rcond=rcond, driver="gelsd")
        X, residuals, rank, S = found
    else:
        X, S, rank = _solve(A, B, rcond)
        # without data, of full rank
        is_full = N < M and (not has_data(rank) or bool((rank == N).all()))
        residuals = (A @ X - B).square().sum(-2) if is_full else X.new_empty(0)
    if vectors:
        X = X.squeeze(-1)
        residuals = residuals.squeeze(-1) if residuals.numel() else residuals
    if dtype is not A.dtype:
        X, residuals, S = X.to(dtype), residuals.to(dtype), S.to(dtype)
    return LeastSquares(X, residuals, rank, S)


def _in_float64(
    precision: str | None, A: Tensor, B: Tensor, rcond: float | Tensor | None
) -> LeastSquares:
    double, A, B = doubled("lstsq", precision, A=A, B=B)
    if double is None:
        return lstsq(A, B, rcond)
    expect_matrix("lstsq", "A", A)
    A, B, vectors = as_one_batch("lstsq", A, B)
    M, N = A.shape[-2:]
    X, left = double.lstsq(A, B)
    rank = torch.full(A.shape[:-2], min(M, N), device=A.device)
    nothing = torch.empty(0, device=A.device)
    residuals = (left * left).sum(-2) if M > N else nothing
    if vectors:
        X, residuals = X.squeeze(-1), residuals.squeeze(-1) if M > N else residuals
    return LeastSquares(X, residuals, rank, nothing)


def _solve(A: Tensor, B: Tensor, rcond: float | Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """X, the singular values of A, and how many of them count."""
    limit = cutoff(A, rcond)
    if torch.is_grad_enabled() and A.requires_grad:
        # the gradient of the pseudo-inverse needs no gaps between singular values
        S: Tensor = svdvals(A.detach())
        X = pinv(A, rcond=limit if rcond is None else rcond) @ B
        return X, S, counting(S, limit).sum(-1)
    batch = A.shape[:-2]
    if isinstance(limit, Tensor):
        return svd_solve("lstsq", A, B, limit.squeeze(-1).to(A.dtype).expand(batch))
    return svd_solve("lstsq", A, B, A.new_full(batch, limit))
