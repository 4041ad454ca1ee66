# SPDX-License-Identifier: MIT
"""Least squares by QR: X that minimises |A X - B| for A of full rank."""

import torch
from torch import Tensor

from metalcore._check import (
    LAPACK_TYPES,
    expect,
    expect_float,
    expect_matrix,
    expect_same_device,
    expect_same_dtype,
    is_eager,
    shape,
)
from metalcore._op import accumulate
from metalcore._trace import left_to_torch
from metalcore.ops.linalg._systems import are_vectors, as_one_batch
from metalcore.ops.linalg.qr import qr, torch_is_ahead
from metalcore.ops.linalg.trsm import trsm


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
    recorded = torch.is_grad_enabled() and (A.requires_grad or B.requires_grad)
    if not recorded and _torch_is_ahead(A, B) and left_to_torch("qr_solve", A):
        return torch.linalg.lstsq(A, B, driver="gels").solution  # type: ignore[no-any-return]
    expect_float("qr_solve", A=A, B=B)
    expect_same_dtype("qr_solve", A=A, B=B)
    expect_same_device("qr_solve", A=A, B=B)
    expect_matrix("qr_solve", "A", A)
    m, n = A.shape[-2:]
    expect(
        m >= n,
        "qr_solve",
        f"A must have at least as many rows as columns, got {shape(A)}; use torch.linalg.lstsq",
    )
    vectors, dtype = are_vectors(A, B), A.dtype
    A, B = as_one_batch("qr_solve", accumulate(A), accumulate(B))
    if recorded or not is_eager():
        Q, R = qr(A)
        X = trsm(R, Q.mT @ B, lower=False)
    else:
        # the R of [A B] holds Q^T B, so that Q is not needed
        R = qr(torch.cat([A, B], -1), "r")[1][..., :n, :]
        X = trsm(R[..., :n], R[..., n:], lower=False)
    X = X.to(dtype)
    return X.squeeze(-1) if vectors else X


def _torch_is_ahead(A: Tensor, B: Tensor) -> bool:
    """For one system, and where torch factors A faster. LAPACK refuses systems without unknowns."""
    return (
        A.dtype in LAPACK_TYPES
        and A.dtype is B.dtype
        and A.dim() == B.dim() >= 2
        and A.shape[:-1] == B.shape[:-1]
        and A.shape[-2] >= A.shape[-1] > 0
        and B.numel() > 0
        and (A.shape[:-2].numel() == 1 or torch_is_ahead(A, "r"))
    )
