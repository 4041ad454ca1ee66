# SPDX-License-Identifier: MIT
"""Batches of matrices as the kernels of linear algebra take them."""

import torch

from metalcore.metal.program import Buffer, Program


def matrices(p: Program, A: Buffer) -> Buffer:
    """A, not empty, as contiguous float32 with one batch dimension."""
    return p.dense(A, torch.float32).view(-1, *A.shape[-2:])
