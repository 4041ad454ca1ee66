# SPDX-License-Identifier: MIT
"""Decompositions of one tall matrix whose rows are split over processes, through its QR."""

from typing import Any

from torch import Tensor

from metalcore._sharding import replicated
from metalcore.ops.linalg.tsqr import tsqr


def _everywhere(x: Any) -> Any:
    """x in all processes."""
    from torch.distributed.tensor import Replicate

    return x.redistribute(x.device_mesh, [Replicate()] * x.device_mesh.ndim)


def svd_by_rows(A: Any, svd: Any) -> tuple[Tensor, Tensor, Tensor]:
    """U, placed as A is, S and V of A = Q R, by those of R; `svd` is the function."""
    Q, R = tsqr(A)
    U, S, V = svd(_everywhere(R).to_local())
    return Q @ replicated(U, A), replicated(S, A), replicated(V, A)


def lstsq_by_rows(A: Any, B: Any, limit: Any, lstsq: Any) -> tuple[Tensor, ...]:
    """Solution, residuals, rank and singular values of A X = B, by those of R X = Q^T B. Singular
    values up to `limit` times the largest count as zero."""
    Q, R = tsqr(A)
    sides: Any = B if B.dim() == 2 else B[:, None]
    projected = _everywhere(Q.mT @ sides).to_local()
    X, _, rank, S = lstsq(_everywhere(R).to_local(), projected, limit)
    X = replicated(X, A)
    M, N = A.shape
    residuals = X.new_empty(0)
    if N < M and bool((rank == N).all()):
        residuals = _everywhere((A @ X - sides).square().sum(0))
    if B.dim() == 1:
        X, residuals = X[:, 0], residuals[0] if residuals.numel() else residuals
    return X, residuals, replicated(rank, A), replicated(S, A)
