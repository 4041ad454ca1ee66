# SPDX-License-Identifier: MIT
"""Linear systems A X = B: what B is, and their batches."""

import torch
from torch import Tensor

from metalcore._check import expect_systems


def are_vectors(A: Tensor, B: Tensor) -> bool:
    """Whether B is [..., N] and not [..., N, K]; torch's rule."""
    return B.dim() == 1 or (B.dim() == A.dim() - 1 and B.shape == A.shape[:-1])


def as_one_batch(op: str, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor, bool]:
    """A [..., M, N] and B as [..., M, K], with the same batch dimensions; and whether B was vectors
    [..., M]."""
    vectors = are_vectors(A, B)
    right = B.unsqueeze(-1) if vectors else B
    expect_systems(op, A, right, given=B)
    return *broadcast(A, right), vectors


def as_right_sides(X: Tensor, B: Tensor) -> Tensor:
    """Solutions X in the dtype of right sides B and laid out as these are: row by row or column by
    column."""
    X = X.to(B.dtype)
    by_columns = B.mT.is_contiguous() and not B.is_contiguous()
    return X.mT.contiguous().mT if by_columns else X.contiguous()


def broadcast(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices with the same batch dimensions, where theirs broadcast."""
    if A.shape[:-2] == B.shape[:-2]:
        return A, B
    batch = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
    return A.expand(*batch, *A.shape[-2:]), B.expand(*batch, *B.shape[-2:])
