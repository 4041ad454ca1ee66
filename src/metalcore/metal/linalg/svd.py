# SPDX-License-Identifier: MIT
"""Programs of svd, svdvals and svd_solve."""

import math

import torch

from metalcore.metal.linalg import qr
from metalcore.metal.linalg._matrices import matrices
from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import SIMD_WIDTH, Arguments, Buffer, Program, round_up

FILE = "linalg/svd.metal"
BLOCKS = "linalg/svd_blocks.metal"

# Rows of a triangle that fill threadgroup memory, with what turned them.
_TRIANGLE = 64
# Rows of a pair of blocks, at most: their Gram matrix and its rotations fill threadgroup memory.
_PAIR = 48
# The simdgroups of a threadgroup share 16 KiB.
_SIMDGROUPS = 4

Parts = tuple[Buffer, Buffer, Buffer, Buffer]


@metal_kernel("svd")
def plan(p: Program, a: Arguments) -> Parts:
    U, S, V, info = _decompose(p, a.A, a.full_matrices, vectors=True)
    U, S, V = (p.rounded(x, a.A.dtype) for x in (U, S, V))
    return U, S, V, info


@metal_kernel("svdvals")
def plan_values(p: Program, a: Arguments) -> tuple[Buffer, Buffer]:
    _, S, _, info = _decompose(p, a.A, False, vectors=False)
    return p.rounded(S, a.A.dtype), info


@metal_kernel("svd_solve")
def plan_solve(p: Program, a: Arguments) -> Parts:
    """X = V diag(1 / S) U^T B over the values that count."""
    U, S, V, info = _decompose(p, a.A, False, vectors=True)
    *batch, M, N = a.A.shape
    K, columns, count = S.shape[-1], a.B.shape[-1], info.numel
    X, rank = p.new((*batch, N, columns)), p.new(batch, torch.int64)
    if S.numel == 0:
        p.fill(X, 0.0)
        p.fill(rank, 0.0)
    else:
        B = p.dense(a.B, torch.float32).view(count, M, columns)
        C = p.new((count, K, columns))
        p.matmul(C, U.view(count, M, K).mT, B)
        group = min(p.policy["threads"], max(1, K * columns))
        grid = (round_up(max(1, K * columns), group), count, 1)
        divide = (C, S, p.dense(a.rcond, torch.float32), C, rank, K, columns)
        p.launch(FILE, "svd_divide", (), divide, grid, group)
        p.matmul(X.view(count, N, columns), V.view(count, N, K), C)
    return p.rounded(X, a.B.dtype), p.rounded(S, a.A.dtype), rank, info


def _decompose(p: Program, A: Buffer, full: bool, vectors: bool) -> Parts:
    """U, S, V in float32, and info; without `vectors` U and V stand for nothing."""
    *batch, rows, columns = A.shape
    K = min(rows, columns)
    U = p.new((*batch, rows, rows if full else K) if vectors else (1,))
    V = p.new((*batch, columns, columns if full else K) if vectors else (1,))
    out = U, p.new((*batch, K)), V, p.new(batch, torch.int32)
    if 0 in (*batch, K):
        p.fill(out[3], 0.0)
        for x in (U, V) if vectors else ():
            p.identity(x)
        return out
    a = matrices(p, A)
    if max(rows, columns) <= SIMD_WIDTH:
        _simdgroup(p, a, out, vectors)
    else:
        _by_triangle(p, a, out, full, vectors)
    return out


def _tolerance(rows: int) -> float:
    """The cosine of an angle that counts as right: a few roundings of a sum over the rows."""
    return 1e-7 * max(1.0, math.sqrt(rows) / 8)


def _simdgroup(p: Program, A: Buffer, out: Parts, vectors: bool) -> None:
    batch, rows, columns = A.shape
    U, _, V, _ = out
    N = next(n for n in (8, 16, 32) if max(rows, columns) <= n)
    simdgroups = -(-batch * N // SIMD_WIDTH)
    group = SIMD_WIDTH * min(_SIMDGROUPS, simdgroups)
    tall = (V if rows < columns else U).shape[-1]
    tolerance = _tolerance(max(rows, columns))
    args = (A, *out, batch, rows, columns, tall, p.policy["sweeps"], tolerance)
    threads = round_up(simdgroups * SIMD_WIDTH, group)
    p.launch(FILE, "svd_simdgroup", (N, _SIMDGROUPS, vectors), args, threads, group)


def _by_triangle(p: Program, A: Buffer, out: Parts, full: bool, vectors: bool) -> None:
    """Of tall A = Q R (of wide ones: transposed), R = W diag(S) Z^T gives A = (Q W) diag(S) Z^T."""
    batch, rows, columns = A.shape
    K = min(rows, columns)
    wide = rows < columns
    U, S, V, info = out
    tall, Z = (V, U) if wide else (U, V)
    mode = "r" if not vectors else "complete" if full else "reduced"
    Q, R = qr.factor(p, A.mT if wide else A, mode)
    if R.shape[1] > K:
        R = p.dense(R[:, :K])
    W = p.new_like(R) if vectors else tall
    parts = W, S, Z, info
    if K <= SIMD_WIDTH:
        _simdgroup(p, R, parts, vectors)
    elif K <= _TRIANGLE:
        threads = p.policy["triangle_threads"]
        args = (R, *parts, K, p.policy["sweeps"], _tolerance(K))
        p.launch(FILE, "svd_threadgroup", (vectors,), args, batch * threads, threads)
    else:
        _blocked(p, R, parts, vectors)
    if vectors:
        tall = tall.view(batch, *tall.shape[-2:])
        p.matmul(tall[:, :, :K], Q[:, :, :K], W)
        if full:
            p.copy(tall[:, :, K:], Q[:, :, K:])


def _blocked(p: Program, R: Buffer, out: Parts, vectors: bool) -> None:
    batch, K, _ = R.shape
    W, S, Z, info = out
    pairs = -(-K // _PAIR)
    height = -(-K // (2 * pairs))
    size, rows, rounds = 2 * height, 2 * height * pairs, 2 * pairs - 1
    length = K + rows if vectors else K
    tolerance, threads = _tolerance(K), p.policy["threads"]

    X, Y = (p.new((batch, rows, length)) for _ in range(2))
    gram, turns = (p.new((batch * pairs, size, size)) for _ in range(2))
    worst = p.new((rounds, batch * pairs))
    powers, levels, found = p.new((batch,)), p.new((batch,)), p.new((batch,), torch.int32)
    begin = (R, X, powers, levels, found, K, rows, length)
    p.launch(BLOCKS, "svd_begin", (), begin, batch * threads, threads)
    blocks, turned = (x.view(batch * pairs, size, length) for x in (X, Y))
    left = blocks[:, :, :K]
    for _ in range(p.policy["block_sweeps"]):
        for turn in range(rounds):
            p.matmul(gram, left, left.mT)
            sweeps = p.policy["pair_sweeps"]
            pair = (gram, turns, worst[turn], levels, pairs, size, sweeps, tolerance)
            p.launch(BLOCKS, "svd_pair", (_PAIR,), pair, batch * pairs * threads, threads)
            p.matmul(turned, turns, blocks)
            move = (Y, X, 2 * pairs, height, length, turn)
            grid = (round_up(length, threads), rows, batch)
            p.launch(BLOCKS, "svd_move", (), move, grid, threads)

    norms, order = p.new((batch, rows)), p.new((batch, K), torch.int32)
    each = batch * rows * SIMD_WIDTH
    p.launch(BLOCKS, "svd_norms", (), (X, norms, K, length), each, SIMD_WIDTH)
    ends = (norms, powers, worst, found, S, order, info, K, rows, rounds, pairs, 64 * tolerance)
    p.launch(BLOCKS, "svd_order", (), ends, batch * threads, threads)
    if vectors:
        Wt, Zt, held = p.new_like(R), p.new_like(R), p.new((batch, K))
        grid = (round_up(K, threads), K, batch)
        p.launch(BLOCKS, "svd_vectors", (), (X, order, found, Wt, K, rows, length), grid, threads)
        # (3 V - V V^T V) / 2 takes back what many products did to the angles of V
        p.matmul(gram := p.new_like(R), Wt, Wt.mT)
        p.matmul(W, Wt.mT, gram, alpha=-0.5, beta=1.5, add=Wt.mT)
        complete = (X, norms, order, levels, found, Zt, held, K, rows, length)
        p.launch(BLOCKS, "svd_complete", (), complete, batch * threads, threads)
        p.copy(Z.view(batch, K, K), Zt.mT)
