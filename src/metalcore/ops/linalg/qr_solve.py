# SPDX-License-Identifier: MIT
"""Least squares by QR: X that minimises |A X - B| for A of full rank."""

import torch
from torch import Tensor

from metalcore._check import (
    expect_float,
    expect_matrix,
    expect_same_device,
    expect_same_dtype,
    may_be_differentiated,
    refuse,
    shape,
)
from metalcore._op import accumulate
from metalcore._route import Matrices
from metalcore.ops.linalg._systems import as_one_batch
from metalcore.ops.linalg.qr import qr
from metalcore.ops.linalg.trsm import trsm

_route = Matrices("qr_solve", lambda A: (A, A[..., :1]))


def qr_solve(A: Tensor, B: Tensor) -> Tensor:
    """Solve A X = B for square or tall A of full column rank, in the sense of least squares.

    Without full rank R has a zero on its diagonal, or nearly so, and X is inf, NaN or large:
    `torch.linalg.lstsq` with driver "gelsd" takes such A.

    Args:
        A: [..., M, N], M >= N.
        B: right sides, [..., M, K]; or vectors [..., M], which is what B is if it has one dimension
            or the shape of A without its last dimension. Batch dimensions broadcast.

    Returns:
        X, [..., N, K] or [..., N].

    Example:
        >>> x = metalcore.qr_solve(torch.randn(100, 32, 8), torch.randn(100, 32))
    """
    expect_float("qr_solve", A=A, B=B)
    expect_same_dtype("qr_solve", A=A, B=B)
    expect_same_device("qr_solve", A=A, B=B)
    expect_matrix("qr_solve", "A", A)
    m, n = A.shape[-2:]
    if m < n:
        refuse(
            "qr_solve",
            f"A must have at least as many rows as columns, got {shape(A)}; use torch.linalg.lstsq",
        )
    dtype = A.dtype
    A, B, vectors = as_one_batch("qr_solve", accumulate(A), accumulate(B))
    if B.numel() and _route.prefers_torch(A, B):
        X: Tensor = _route.by_torch(torch.linalg.lstsq, A, B, driver="gels").solution
    elif may_be_differentiated(A, B):
        Q, R = qr(A)
        X = trsm(R, Q.mT @ B, lower=False)
    else:
        # the R of [A B] holds Q^T B, so that Q is not needed
        R = qr(torch.cat([A, B], -1), "r")[1][..., :n, :]
        X = trsm(R[..., :n], R[..., n:], lower=False)
    X = X.squeeze(-1) if vectors else X
    return X if X.dtype is dtype else X.to(dtype)
