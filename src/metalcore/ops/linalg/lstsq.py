# SPDX-License-Identifier: MIT
"""Least squares: the X of smallest norm among those that make ||A X - B|| smallest."""

from typing import NamedTuple

import torch
from torch import Tensor

from metalcore._check import expect_float, expect_matrix, expect_same_dtype
from metalcore._op import accumulate
from metalcore._trace import left_to_torch
from metalcore.ops.linalg._systems import are_vectors, as_one_batch
from metalcore.ops.linalg.pinv import cutoff, pinv
from metalcore.ops.linalg.qr import qr
from metalcore.ops.linalg.svd import (
    counting,
    solves_side_by_side,
    svd_solve,
    svdvals,
    torch_is_ahead,
)
from metalcore.ops.linalg.trsm import trsm


class LeastSquares(NamedTuple):
    """What `lstsq` returns."""

    solution: Tensor
    residuals: Tensor
    rank: Tensor
    singular_values: Tensor


# Single matrices from this on go by QR; for smaller ones torch's singular vectors take no longer.
_SMALL = 64 * 64


def lstsq(A: Tensor, B: Tensor, rcond: float | Tensor | None = None) -> LeastSquares:
    """Least squares solution of A X = B for each matrix of a batch, over- or underdetermined and of
    any rank.

    Args:
        A: [..., M, N].
        B: [..., M] or [..., M, K], of A's dtype; batch dimensions are broadcast.
        rcond: singular values up to this times the largest count as zero. Default max(M, N) times
            the machine epsilon.

    Returns:
        `solution` [..., N] or [..., N, K], `residuals` ||A X - B||^2 [...] or [..., K] (empty
        unless M > N and every matrix has rank N), `rank` [...] (int64) and `singular_values`
        [..., min(M, N)].

    Example:
        >>> X, residuals, rank, S = metalcore.lstsq(A, B)
    """
    if (
        A.numel() < _SMALL
        and A.ndim == B.ndim
        and B.dtype is A.dtype
        and torch_is_ahead(A, 1, 0)
        and A.shape[:-1] == B.shape[:-1]
        and not isinstance(rcond, Tensor)
        and left_to_torch("lstsq", A)
    ):
        return LeastSquares(*torch.linalg.lstsq(A, B, rcond=rcond, driver="gelsd"))
    expect_float("lstsq", A=A, B=B)
    expect_matrix("lstsq", "A", A)
    expect_same_dtype("lstsq", A=A, B=B)
    vectors = are_vectors(A, B)
    dtype, limit = A.dtype, cutoff(A, rcond)
    A, B = as_one_batch("lstsq", accumulate(A), accumulate(B))
    M, N = A.shape[-2:]
    S: Tensor
    if torch.is_grad_enabled() and A.requires_grad:
        # the gradient of the pseudo-inverse needs no gaps between singular values
        S = svdvals(A.detach())
        X, rank = (
            pinv(A, rcond=rcond if rcond is not None else limit) @ B,
            counting(S, limit).sum(-1),
        )
    elif A.is_cpu and min(M, N) > 0 and not solves_side_by_side(A, B):
        X, S, rank = _by_qr(A, B, limit)
    else:
        X, S, rank = _by_singular_values(A, B, limit)
    if N < M and bool((rank == N).all()):
        residuals = (A @ X - B).square().sum(-2)
    else:
        residuals = X.new_empty(0)
    if vectors:
        X = X.squeeze(-1)
        residuals = residuals.squeeze(-1) if residuals.numel() else residuals
    if dtype is not S.dtype:
        X, residuals, S = X.to(dtype), residuals.to(dtype), S.to(dtype)
    return LeastSquares(X, residuals, rank, S)


Found = tuple[Tensor, Tensor, Tensor]


def _by_singular_values(A: Tensor, B: Tensor, limit: float | Tensor) -> Found:
    batch = A.shape[:-2]
    if isinstance(limit, Tensor):
        return svd_solve("lstsq", A, B, limit.squeeze(-1).to(A.dtype).expand(batch))
    return svd_solve("lstsq", A, B, torch.full(batch, limit, dtype=A.dtype, device=A.device))


def _by_qr(A: Tensor, B: Tensor, limit: float | Tensor) -> Found:
    """A = Q R, or A^T = Q R for wide matrices. The singular values of R are those of A; their
    vectors are only needed where one of them counts as zero."""
    M, N = A.shape[-2:]
    if A.dim() == 2 and M >= N:
        # one large matrix: Q is applied as it stands, in reflectors
        reflectors, tau = torch.geqrf(A)
        R, C = reflectors[:N].triu(), torch.ormqr(reflectors, tau, B, transpose=True)[:N]
    else:
        Q, R = qr(A if M >= N else A.mT)
        C = Q.mT @ B if M >= N else B
    S: Tensor = svdvals(R)
    rank = counting(S, limit).sum(-1)
    if not bool((rank == S.shape[-1]).all()):
        return _by_singular_values(A, B, limit)
    if M >= N:
        return trsm(R, C, lower=False), S, rank
    return Q @ trsm(R, C, lower=False, transpose=True), S, rank
