# SPDX-License-Identifier: MIT
"""Least squares: the X of smallest norm among those that make ||A X - B|| smallest."""

from typing import NamedTuple

import torch
from torch import Tensor

from metalcore._check import expect_float, expect_matrix, expect_same_dtype
from metalcore._op import accumulate
from metalcore.ops.linalg._systems import are_vectors, as_one_batch
from metalcore.ops.linalg.pinv import cutoff, inverted, pinv
from metalcore.ops.linalg.qr import qr
from metalcore.ops.linalg.svd import svd, svdvals, torch_is_ahead


class LeastSquares(NamedTuple):
    """What `lstsq` returns."""

    solution: Tensor
    residuals: Tensor
    rank: Tensor
    singular_values: Tensor


# Fewest columns of a single matrix that goes by QR: below, torch's singular vectors take no longer.
_QR_FROM = 16


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
        torch_is_ahead(A, least=1)
        and (A.shape[1] < _QR_FROM or A.shape[0] < A.shape[1])
        and B.dim() == 2
        and B.dtype == A.dtype
        and B.shape[0] == A.shape[0]
        and not isinstance(rcond, Tensor)
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
        X = pinv(A, rcond=rcond if rcond is not None else limit) @ B
    elif A.dim() == 2 and A.device.type == "cpu" and M >= N >= _QR_FROM:
        X, S = _by_qr(A, B, limit)
    else:
        X, S = _by_singular_vectors(A, B, limit)
    rank = (limit * S[..., :1] < S).sum(-1)
    if N < M and bool((rank == N).all()):
        residuals = (A @ X - B).square().sum(-2)
    else:
        residuals = X.new_empty(0)
    if vectors:
        X = X.squeeze(-1)
        residuals = residuals.squeeze(-1) if residuals.numel() else residuals
    return LeastSquares(X.to(dtype), residuals.to(dtype), rank, S.to(dtype))


def _by_singular_vectors(A: Tensor, B: Tensor, limit: float | Tensor) -> tuple[Tensor, Tensor]:
    U, S, V = svd(A)
    if S.shape[-1] == 0:
        return A.new_zeros(*A.shape[:-2], A.shape[-1], B.shape[-1]), S
    return V @ (inverted(S, limit)[..., None] * (U.mT @ B)), S


def _by_qr(A: Tensor, B: Tensor, limit: float | Tensor) -> tuple[Tensor, Tensor]:
    """One tall matrix: its rank is that of R, whose singular vectors serve where it is not full."""
    Q, R = qr(A)
    S = svdvals(R)
    C = Q.mT @ B
    if bool((S[-1:] > limit * S[:1]).all()):
        return torch.linalg.solve_triangular(R, C, upper=True), S
    return _by_singular_vectors(R, C, limit)
