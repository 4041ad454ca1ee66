# SPDX-License-Identifier: MIT
"""Condition number: ||A|| * ||A^-1||."""

import math

import torch
from torch import Tensor

from metalcore._check import expect_float, expect_matrix, expect_square, refuse
from metalcore._op import accumulate
from metalcore.ops.linalg.svd import svdvals

_ORDERS = (None, "fro", "nuc", math.inf, -math.inf, 1, -1, 2, -2)


def cond(A: Tensor, p: float | str | None = None) -> Tensor:
    """Condition number of each matrix of a batch; inf for singular ones.

    Args:
        A: [..., M, N] for p = None, 2 and -2, else [..., N, N].
        p: which norm: None or 2 (largest by smallest singular value), -2 (the inverse of it),
            "fro", "nuc", inf, -inf, 1, -1; as in `torch.linalg.matrix_norm`.

    Returns:
        [...].

    Example:
        >>> metalcore.cond(torch.eye(3))
        tensor(1.)
    """
    if p not in _ORDERS:
        refuse("cond", f"p must be None, 'fro', 'nuc', 1, -1, 2, -2, inf or -inf, got {p!r}")
    expect_float("cond", A=A)
    (expect_matrix if p in (None, 2, -2) else expect_square)("cond", "A", A)
    if A.numel() == 0:
        return A.new_zeros(A.shape[:-2])
    X = accumulate(A)
    if p in (None, 2, -2, "nuc"):
        S: Tensor = svdvals(X)
        if p == "nuc":
            return (S.sum(-1) * (1 / S).sum(-1)).to(A.dtype)
        ratio = S[..., -1] / S[..., 0] if p == -2 else S[..., 0] / S[..., -1]
        return ratio.to(A.dtype)
    inverse, info = torch.linalg.inv_ex(X)
    product = torch.linalg.matrix_norm(X, p) * torch.linalg.matrix_norm(inverse, p)
    return torch.where(info == 0, product, math.inf).to(A.dtype)
