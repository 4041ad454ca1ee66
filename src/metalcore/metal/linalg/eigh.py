# SPDX-License-Identifier: MIT
"""Programs of eigh and eigvalsh."""

import torch

from metalcore.metal.linalg._matrices import matrices
from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import SIMD_WIDTH, Arguments, Buffer, Program, Value, round_up

FILE = "linalg/eigh.metal"
# Rows of a block, and of a strip that a simdgroup rotates.
BLOCK, STRIP = 32, 16
# Rows of a matrix that fits the memory of a threadgroup, as a pair of blocks does.
PAIR = 2 * BLOCK


@metal_kernel("eigh")
def plan(p: Program, a: Arguments) -> tuple[Buffer, Buffer, Buffer]:
    L, Q, info = _decompose(p, a.A, a.upper, vectors=True)
    return p.rounded(L, a.A.dtype), p.rounded(Q, a.A.dtype), info


@metal_kernel("eigvalsh")
def plan_values(p: Program, a: Arguments) -> tuple[Buffer, Buffer]:
    L, _, info = _decompose(p, a.A, a.upper, vectors=False)
    return p.rounded(L, a.A.dtype), info


def _decompose(p: Program, A: Buffer, upper: bool, vectors: bool) -> tuple[Buffer, Buffer, Buffer]:
    """L, Q and info; without `vectors` Q stands for nothing."""
    n = A.shape[-1]
    L, Q = p.new(A.shape[:-1]), p.new(A.shape if vectors else (1,))
    info = p.new(A.shape[:-2], torch.int32)
    if A.numel == 0:
        p.fill(info, 0.0)
        return L, Q, info
    a, batch = matrices(p, A.mT if upper else A), info.numel
    if n <= SIMD_WIDTH:
        lanes = next(size for size in (8, 16, 32) if n <= size)
        groups = -(-batch * lanes // SIMD_WIDTH)
        small = (a, L, Q, info, batch, n)
        _launch(p, "eigh_simdgroup", (lanes, vectors), small, groups, SIMD_WIDTH)
    elif n <= PAIR:
        middle = (a, L, Q, info, n)
        _launch(p, "eigh_threadgroup", (PAIR, vectors), middle, batch, p.policy["threads"])
    else:
        _blocked(p, a, L, Q, info, vectors)
    return L, Q, info


def _blocked(p: Program, a: Buffer, L: Buffer, Q: Buffer, info: Buffer, vectors: bool) -> None:
    """Sweeps over the pairs of blocks. Where a pair has nothing to rotate, its launches return at
    once: their number is fixed, and what they do is up to the matrix."""
    n, batch, threads = a.shape[-1], info.numel, p.policy["threads"]
    padded = round_up(n, PAIR)
    blocks = padded // BLOCK
    pairs, rounds, strips = blocks // 2, blocks - 1, padded // STRIP
    W = p.new((batch, padded, padded))
    V = p.new(W.shape if vectors else (1,))
    largest, squares = p.new((batch, n)), p.new((batch, padded))
    J = p.new((batch, pairs, PAIR, PAIR))
    exponents, order = p.new((batch,), torch.int32), p.new((batch, n), torch.int32)
    active = p.new((rounds, batch, pairs), torch.int32)
    _launch(p, "eigh_row_max", (), (a, largest, n), batch * n, SIMD_WIDTH)
    pad = (a, largest, W, V, squares, exponents, n, padded)
    _launch(p, "eigh_pad", (vectors,), pad, batch * padded, SIMD_WIDTH)
    for _ in range(p.policy["sweeps"]):
        for turn in range(rounds):
            found = active[turn]
            block = (W, squares, J, found, n, padded, turn, p.policy["block_sweeps"])
            _launch(p, "eigh_block", (BLOCK,), block, batch * pairs, threads)
            rows = (W, J, found, W, padded, turn)
            groups = batch * pairs * strips
            _launch(p, "eigh_rotate_rows", (BLOCK, STRIP), rows, groups, SIMD_WIDTH)
            columns = (W, V, J, found, W, V, padded, turn)
            variant = (BLOCK, STRIP, vectors)
            groups *= 1 + vectors
            _launch(p, "eigh_rotate_columns", variant, columns, groups, SIMD_WIDTH)
    ends = (W, exponents, active, L, order, info, batch, n, padded, rounds, pairs)
    _launch(p, "eigh_order", (), ends, -(-batch * n // SIMD_WIDTH), SIMD_WIDTH)
    if vectors:
        # one Newton step, V (3 - V^T V) / 2, takes back what rounding did to lengths and angles
        p.matmul(W, V.mT, V)
        straight = p.new_like(V)
        p.matmul(straight, V, W, alpha=-0.5, beta=1.5, add=V)
        last = (straight, order, exponents, Q, Q.numel, n, padded)
        _launch(p, "eigh_columns", (), last, -(-Q.numel // threads), threads)


def _launch(
    p: Program,
    function: str,
    variant: tuple[int, ...],
    args: tuple[Value, ...],
    groups: int,
    group: int,
) -> None:
    p.launch(FILE, function, variant, args, groups * group, group)
