# SPDX-License-Identifier: MIT
"""Programs of cholesky."""

import torch

from metalcore.metal.linalg._matrices import matrices
from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import (
    MAX_THREADGROUP_BYTES,
    SIMD_WIDTH,
    Arguments,
    Buffer,
    Program,
    round_up,
)

FILE = "linalg/cholesky.metal"

# Columns that a threadgroup factors.
BLOCK = 64


@metal_kernel("cholesky")
def plan(p: Program, a: Arguments) -> tuple[Buffer, Buffer]:
    A, upper = a.A, a.upper
    info = p.new(A.shape[:-2], torch.int32)
    if A.numel == 0:
        return p.new_like(A), p.fill(info, 0)
    lower, L = A.mT if upper else A, p.new(A.shape)
    if A.shape[-1] <= SIMD_WIDTH:
        _simdgroup(p, matrices(p, lower), matrices(p, L), info)
    elif A.shape[-1] <= BLOCK:
        _threadgroup(p, matrices(p, lower), matrices(p, L), info, 0)
    else:
        _blocks(p, matrices(p, p.copy(L, lower)), info)
    if upper:
        return p.copy(p.new_like(A), L.mT), info
    return p.rounded(L, A.dtype), info


def _simdgroup(p: Program, A: Buffer, L: Buffer, info: Buffer) -> None:
    batch, n, _ = A.shape
    width = next(w for w in (8, 16, 32) if n <= w)
    fit = MAX_THREADGROUP_BYTES // (4 * SIMD_WIDTH * (width + 1))
    simdgroups = min(p.policy["simdgroups"], fit)
    group = simdgroups * SIMD_WIDTH
    threads = round_up(batch * width, group)
    p.launch(
        FILE, "cholesky_simdgroup", (width, simdgroups), (A, L, info, batch, n), threads, group
    )


def _threadgroup(p: Program, A: Buffer, L: Buffer, info: Buffer, start: int) -> None:
    batch, order, _ = A.shape
    args = (A, info, L, info, min(BLOCK, order - start), start, order)
    p.launch(FILE, "cholesky_threadgroup", (BLOCK,), args, batch * BLOCK, BLOCK)


def _blocks(p: Program, L: Buffer, info: Buffer) -> None:
    """Factor in place: the block on the diagonal, the rows below it, then what is left."""
    batch, order, _ = L.shape
    for start in range(0, order, BLOCK):
        _threadgroup(p, L, L, info, start)
        stop = start + BLOCK
        if stop < order:
            threads = (round_up(order - stop, SIMD_WIDTH), batch, 1)
            p.launch(FILE, "cholesky_panel", (BLOCK,), (L, L, start, order), threads, SIMD_WIDTH)
            panel = L[:, stop:, start:stop]
            p.matmul(L[:, stop:, stop:], panel, panel.mT, alpha=-1.0, beta=1.0)
    group = min(p.policy["simdgroups"] * SIMD_WIDTH, round_up(order, SIMD_WIDTH))
    p.launch(
        FILE, "cholesky_finish", (), (L, L, order), (round_up(order, group), order, batch), group
    )
