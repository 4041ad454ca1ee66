# SPDX-License-Identifier: MIT
"""Linear systems A X = B: what B is, and their batches."""

import torch
from torch import Tensor

from metalcore._check import FLOATS, expect_systems


def are_vectors(A: Tensor, B: Tensor) -> bool:
    """Whether B is [..., N] and not [..., N, K]; torch's rule."""
    return B.dim() == 1 or (B.dim() == A.dim() - 1 and B.shape == A.shape[:-1])


def are_usual(A: Tensor, B: Tensor) -> bool:
    """Whether square A [..., N, N] and B [..., N, K] go as they are: all checks in one, which is
    1.3x for the solution of one system of 8 x 8."""
    size = A.shape
    return (
        len(size) >= 2
        and size[-1] == size[-2]
        and size[:-1] == B.shape[:-1]
        and len(size) == B.dim()
        and A.dtype == B.dtype
        and A.dtype in FLOATS
        and A.device == B.device
    )


def as_one_batch(op: str, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """A [..., M, N] and B as [..., M, K], with the same batch dimensions."""
    given, B = B, B.unsqueeze(-1) if are_vectors(A, B) else B
    expect_systems(op, A, B, given=given)
    return broadcast(A, B)


def broadcast(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices with the same batch dimensions, where theirs broadcast."""
    if A.shape[:-2] == B.shape[:-2]:
        return A, B
    batch = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
    return A.expand(*batch, *A.shape[-2:]), B.expand(*batch, *B.shape[-2:])
