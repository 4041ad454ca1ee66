# SPDX-License-Identifier: MIT
"""Programs of orthogonalize."""

import torch

from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import MSL_TYPE, Arguments, Buffer, Program, round_up

FILE = "linalg/orthogonalize.metal"
# Sides of a tile of the Gram matrix, columns that a launch factors, and rows that are divided at
# once.
_TILE, _BLOCK, _ROWS = 16, 32, 16


@metal_kernel("orthogonalize")
def plan(p: Program, a: Arguments) -> Buffer:
    Q = p.new_like(a.A)
    if Q.numel == 0:
        return Q
    M, K = Q.shape[-2:]
    batch, threads = Q.numel // (M * K), p.policy["threads"]
    W, spare = (p.new((batch, K, M)) for _ in range(2))
    load, variant = (p.dense(a.A), W, K, M), (MSL_TYPE[Q.dtype],)
    p.launch(FILE, "orthogonalize_load", variant, load, (K * threads, batch, 1), threads)
    L, low, P = (p.new((batch, K, K)) for _ in range(3))
    zeros = p.new((batch, K), torch.int32)
    count = -(-M // p.policy["gram_rows"])
    parts = p.new((batch, count, 2, K, K))
    for _ in range(p.policy["passes"]):
        _gram(p, W, parts)
        for first in range(0, K, _BLOCK):
            below = max(1, -(-(K - first - _BLOCK) // _BLOCK))
            factor = (parts, L, low, L, low, zeros, count, K, first)
            grid = (below * threads, batch, 1)
            p.launch(FILE, "orthogonalize_factor", (_BLOCK,), factor, grid, threads)
        group = p.policy["divide_threads"]
        divide = (W, L, low, zeros, W, spare, K, M)
        grid = (round_up(M, group), batch, 1)
        p.launch(FILE, "orthogonalize_divide", (_ROWS,), divide, grid, group)
    for _ in range(p.policy["corrections"]):
        _gram(p, W, parts)
        excess = (parts, P, count, K, P.numel)
        p.launch(FILE, "orthogonalize_excess", (), excess, round_up(P.numel, threads), threads)
        p.matmul(spare, P, W, alpha=-1.0, beta=1.0, add=W)
        W, spare = spare, W
    p.copy(Q.view(batch, M, K), W.mT)
    return Q


def _gram(p: Program, W: Buffer, parts: Buffer) -> None:
    """The parts of W W^T."""
    batch, K, M = W.shape
    tiles = -(-K // _TILE)
    args = (W, parts, K, M, p.policy["gram_rows"])
    group = _TILE * _TILE
    grid = (tiles * (tiles + 1) // 2 * group, parts.shape[1], batch)
    p.launch(FILE, "orthogonalize_gram", (_TILE,), args, grid, group)
