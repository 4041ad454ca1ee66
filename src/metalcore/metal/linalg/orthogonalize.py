# SPDX-License-Identifier: MIT
"""Launches of orthogonalize."""

import torch
from torch import Tensor

from metalcore._policy import Values
from metalcore.metal.launch import MSL_TYPE, Call, Launch, Planned, Step, metal_kernel, round_up

FILE = "linalg/orthogonalize.metal"
# Sides of a tile of the Gram matrix, and columns that a launch factors.
_TILE, _BLOCK = 16, 32


@metal_kernel("orthogonalize")
def plan(policy: Values, A: Tensor) -> Planned | None:
    if A.dtype not in MSL_TYPE:
        return None
    Q = A.new_empty(A.shape)
    if A.numel() == 0:
        return [], Q
    M, K = A.shape[-2:]
    a = A.float().reshape(-1, M, K)
    batch = a.shape[0]
    W, next_W = (a.new_empty(batch, K, M) for _ in range(2))
    L, low, P = (a.new_empty(batch, K, K) for _ in range(3))
    zeros = torch.empty(batch, K, dtype=torch.int32, device=A.device)
    share = policy["gram_rows"]
    count = -(-M // share)
    parts = a.new_empty(batch, count, 2, K, K)
    tiles = -(-K // _TILE)
    threads = policy["threads"]

    def gram(of: Tensor) -> Launch:
        grid = (tiles * (tiles + 1) // 2 * _TILE * _TILE, count, batch)
        group = (_TILE * _TILE, 1, 1)
        return Launch(FILE, "orthogonalize_gram", "16", (of, parts, K, M, share), grid, group)

    steps: list[Step] = [Call(_load, (a, W))]
    for _ in range(policy["passes"]):
        steps.append(gram(W))
        for first in range(0, K, _BLOCK):
            below = max(1, -(-(K - first - _BLOCK) // _BLOCK))
            factor = (parts, L, low, zeros, count, K, first)
            grid = (below * threads, batch, 1)
            group = (threads, 1, 1)
            steps.append(Launch(FILE, "orthogonalize_factor", "32", factor, grid, group))
        group = (policy["divide_threads"], 1, 1)
        grid = (round_up(M, group[0]), batch, 1)
        divide = (W, next_W, L, low, zeros, K, M)
        steps.append(Launch(FILE, "orthogonalize_divide", "16", divide, grid, group))
    for _ in range(policy["corrections"]):
        steps.append(gram(W))
        excess = (parts, P, count, K, P.numel())
        grid = (round_up(P.numel(), threads), 1, 1)
        group = (threads, 1, 1)
        steps.append(Launch(FILE, "orthogonalize_excess", "float", excess, grid, group))
        steps.append(Call(torch.baddbmm, (W, P, W), {"alpha": -1, "out": next_W}))
        W, next_W = next_W, W
    steps.append(Call(Q.copy_, (W.mT.view(A.shape),)))
    return steps, Q


def _load(A: Tensor, W: Tensor) -> None:
    """The columns of A as rows, with a largest value of 1."""
    largest = A.abs().amax(-2, keepdim=True)
    W.copy_((A / largest.where(largest != 0, 1.0)).mT)
