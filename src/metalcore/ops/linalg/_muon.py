# SPDX-License-Identifier: MIT
"""Muon's steps towards the nearest orthonormal matrix: products alone."""

import torch
from torch import Tensor

from metalcore import _torch

# The smallest block of a Gram matrix that is a product of its own.
_BLOCK_ROWS = 256


def newton_schulz(
    X: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """X <- a X + (b G + c G^2) X with G = X X^T, for wide X [batch, M, N] of norm 1."""
    a, b, c = coefficients
    in_bfloat16 = not X.is_cpu or _torch.has_bfloat16_instructions()
    X = X.to(torch.bfloat16 if in_bfloat16 else torch.float32)
    norms = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    X = X / norms.clamp(min=eps).to(X.dtype)
    if len(X) > 1:
        for _ in range(steps):
            G = X @ X.mT
            X = torch.baddbmm(X, torch.baddbmm(G, G, G, beta=b, alpha=c), X, beta=a)
        return X
    # a batch of one takes longer than its matrix
    one = X[0]
    for _ in range(steps):
        G = _gram(one)
        one = torch.addmm(one, _gram(G).mul_(c).add_(G, alpha=b), one, beta=a)
    return one[None]


def _gram(X: Tensor) -> Tensor:
    """X X^T [M, M]; of a block and its mirror image one is computed."""
    half = X.shape[0] // 2
    if half < _BLOCK_ROWS or not X.is_cpu:
        return X @ X.mT
    top, bottom = X[:half], X[half:]
    G = X.new_empty(X.shape[0], X.shape[0])
    G[:half, :half], G[half:, half:] = _gram(top), _gram(bottom)
    torch.mm(bottom, top.mT, out=G[half:, :half])
    G[:half, half:] = G[half:, :half].mT
    return G
