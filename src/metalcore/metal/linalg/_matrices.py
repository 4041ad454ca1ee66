# SPDX-License-Identifier: MIT
"""Batches of matrices as the kernels of linear algebra take them."""

import torch

from metalcore.metal.program import MAX_UINT, Buffer, Program


def matrices(p: Program, A: Buffer) -> Buffer:
    """A, not empty, as contiguous float32 with one batch dimension; kernels count the values of a
    matrix in 32 bits."""
    m, n = A.shape[-2:]
    if m * n > MAX_UINT:
        raise ValueError(f"Metal kernels take matrices of up to {MAX_UINT} values, got {m} x {n}")
    return p.dense(A, torch.float32).view(-1, *A.shape[-2:])


def as_right_sides(p: Program, X: Buffer, B: Buffer) -> Buffer:
    """Solutions X, contiguous, in the dtype of right sides B and laid out as these are: row by row
    or column by column."""
    if B.is_contiguous or not B.mT.is_contiguous:
        return p.rounded(X, B.dtype)
    return p.copy(p.new(B.mT.shape, B.dtype), X.mT).mT
