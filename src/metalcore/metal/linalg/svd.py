# SPDX-License-Identifier: MIT
"""Launches of svd, svdvals and svd_solve."""

import math

import torch
from torch import Tensor

from metalcore._policy import Values
from metalcore._policy import policy as policy_of
from metalcore.metal.launch import (
    MSL_TYPE,
    SIMD_WIDTH,
    Call,
    Launch,
    Planned,
    Step,
    metal_kernel,
    round_up,
)
from metalcore.metal.linalg import qr

FILE = "linalg/svd.metal"
BLOCKS = "linalg/svd_blocks.metal"

# Rows of a triangle that fill threadgroup memory, with what turned them.
_TRIANGLE = 64

# Rows of a pair of blocks, at most: their Gram matrix and its rotations fill threadgroup memory.
_PAIR = 48
# The simdgroups of a threadgroup share 16 KiB.
_SIMDGROUPS = 4

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]


@metal_kernel("svd")
def plan_svd(policy: Values, A: Tensor, full_matrices: bool) -> Planned | None:
    if A.dtype not in MSL_TYPE:
        return None
    steps, (U, S, V, info) = _decompose(policy, A, full_matrices, vectors=True)
    return steps, (U, S, V, info)


@metal_kernel("svdvals")
def plan_svdvals(policy: Values, A: Tensor) -> Planned | None:
    if A.dtype not in MSL_TYPE:
        return None
    steps, (_, S, _, info) = _decompose(policy, A, False, vectors=False)
    return steps, (S, info)


@metal_kernel("svd_solve")
def plan_solve(policy: Values, A: Tensor, B: Tensor, rcond: Tensor) -> Planned | None:
    if A.dtype not in MSL_TYPE:
        return None
    steps, (U, S, V, info) = _decompose(policy, A.float(), False, vectors=True)
    X = B.new_empty(*B.shape[:-2], A.shape[-1], B.shape[-1])
    values, rank = torch.empty_like(S, dtype=A.dtype), torch.empty_like(info, dtype=torch.int64)
    parts = (U, S, V, B, rcond)
    return [*steps, Call(_solve, (*parts, X, values, rank))], (X, values, rank, info)


def _solve(
    U: Tensor,
    S: Tensor,
    V: Tensor,
    B: Tensor,
    rcond: Tensor,
    X: Tensor,
    values: Tensor,
    rank: Tensor,
) -> None:
    """X = V diag(1 / S) U^T B over the values that count."""
    limit = rcond.float()[..., None] * S[..., :1]
    inverse = (1 / S).masked_fill(limit >= S, 0.0)
    X.copy_(V @ (inverse[..., None] * (U.mT @ B.float())))
    values.copy_(S)
    rank.copy_((limit < S).sum(-1))


def _decompose(policy: Values, A: Tensor, full: bool, vectors: bool) -> tuple[list[Step], Outputs]:
    """The steps, and U, S, V and info in A's dtype; U and V are scratch without `vectors`."""
    rows, columns = A.shape[-2:]
    K = min(rows, columns)
    batch = A.shape[:-2]
    sizes = [
        (*batch, rows, rows if full else K),
        (*batch, K),
        (*batch, columns, columns if full else K),
    ]
    if not vectors:
        sizes[0] = sizes[2] = (1,)
    U, S, V = (A.new_empty(size, dtype=torch.float32) for size in sizes)
    info = A.new_empty(batch, dtype=torch.int32)
    steps: list[Step] = []
    if info.numel() == 0 or K == 0:
        info.zero_()
        for x in (U, V):
            x.copy_(torch.eye(*x.shape[-2:], device=A.device)) if x.dim() > 1 else x.zero_()
    else:
        x = A.float().contiguous().view(-1, rows, columns)
        out = U, S, V, info
        if max(rows, columns) <= SIMD_WIDTH:
            steps.append(_simdgroup(policy, x, out, vectors))
        else:
            steps += _by_triangle(policy, x, out, full, vectors)
    if A.dtype == torch.float32:
        return steps, (U, S, V, info)
    rounded = [torch.empty_like(y, dtype=A.dtype) for y in (U, S, V)]
    steps += [Call(to.copy_, (y,)) for to, y in zip(rounded, (U, S, V), strict=True)]
    return steps, (*rounded, info)  # type: ignore[return-value]


def _tolerance(rows: int) -> float:
    """The cosine of an angle that counts as right: a few roundings of a sum over the rows."""
    return 1e-7 * max(1.0, math.sqrt(rows) / 8)


def _simdgroup(policy: Values, A: Tensor, out: Outputs, vectors: bool) -> Launch:
    batch, rows, columns = A.shape
    U, S, V, info = out
    N = next(n for n in (8, 16, 32) if max(rows, columns) <= n)
    simdgroups = -(-batch * N // SIMD_WIDTH)
    group = SIMD_WIDTH * min(_SIMDGROUPS, simdgroups)
    tall = (V if rows < columns else U).shape[-1]
    return Launch(
        FILE,
        "svd_simdgroup",
        str(N),
        (
            *(A, U, S, V, info, batch, rows, columns, tall, int(vectors)),
            *(policy["sweeps"], _tolerance(max(rows, columns))),
        ),
        threads=(round_up(simdgroups * SIMD_WIDTH, group), 1, 1),
        group=(group, 1, 1),
    )


def _by_triangle(policy: Values, A: Tensor, out: Outputs, full: bool, vectors: bool) -> list[Step]:
    """Of tall A = Q R (of wide ones: transposed), R = W diag(S) Z^T gives A = (Q W) diag(S) Z^T."""
    batch, rows, columns = A.shape
    K = min(rows, columns)
    wide = rows < columns
    U, S, V, info = out
    tall, Z = (V, U) if wide else (U, V)
    mode = "r" if not vectors else "complete" if full else "reduced"
    planned = qr.plan(policy_of("qr", "metal"), A.mT if wide else A, mode)
    assert planned is not None
    steps, (Q, R) = list(planned[0]), planned[1]
    if R.shape[1] > K:
        R, taller = R.new_empty(batch, K, K), R
        steps.append(Call(R.copy_, (taller[:, :K],)))
    W = torch.empty_like(R) if vectors else tall
    parts = W, S, Z, info
    if K <= SIMD_WIDTH:
        steps.append(_simdgroup(policy, R, parts, vectors))
    elif K <= _TRIANGLE:
        threads = policy["triangle_threads"]
        args = (R, *parts, K, int(vectors), policy["sweeps"], _tolerance(K))
        whole = (batch * threads, 1, 1)
        steps.append(Launch(FILE, "svd_threadgroup", "float", args, whole, (threads, 1, 1)))
    else:
        flat = (W, S.view(-1, K), Z.view(-1, K, K) if vectors else Z, info.view(-1))
        steps += _blocked(policy, R, flat, vectors)
    if vectors:
        tall = tall.view(batch, *tall.shape[-2:])
        steps.append(Call(torch.bmm, (Q[..., :K], W), {"out": tall[..., :K]}))
        if full:
            steps.append(Call(tall[..., K:].copy_, (Q[..., K:],)))
    return steps


def _blocked(policy: Values, R: Tensor, out: Outputs, vectors: bool) -> list[Step]:
    batch, K, _ = R.shape
    W, S, Z, info = out
    pairs = -(-K // _PAIR)
    block = -(-K // (2 * pairs))
    size, P = 2 * block, 2 * block * pairs
    length = K + P if vectors else K
    tolerance = _tolerance(K)

    # X = [R | W^T], padded with zeros
    X, Y = (R.new_zeros(batch, P, length) for _ in range(2))
    gram, turns = (R.new_empty(batch * pairs, size, size) for _ in range(2))
    worst = R.new_empty(2 * pairs - 1, batch * pairs)
    powers, levels = (R.new_empty(batch) for _ in range(2))
    threads = policy["threads"]
    group = (threads, 1, 1)
    steps: list[Step] = [Call(X[:, :K, :K].copy_, (R,))]
    if vectors:
        steps.append(Call(X[:, :, K:].diagonal(dim1=1, dim2=2).fill_, (1.0,)))
    begin = (X, powers, levels, info, P, K, length)
    steps.append(Launch(BLOCKS, "svd_begin", "float", begin, (batch * threads, 1, 1), group))

    blocks = X.view(batch * pairs, size, length)
    turned = Y.view(batch * pairs, size, length)
    moves = _tournament(pairs, R.device)
    for _ in range(policy["block_sweeps"]):
        for turn in range(2 * pairs - 1):
            rows = blocks[..., :K]
            steps.append(Call(torch.bmm, (rows, rows.mT), {"out": gram}))
            pair = (gram, turns, worst[turn], levels, pairs, size, policy["pair_sweeps"], tolerance)
            grid = (batch * pairs * threads, 1, 1)
            steps.append(Launch(BLOCKS, "svd_pair", "float", pair, grid, group))
            steps.append(Call(torch.bmm, (turns, blocks), {"out": turned}))
            old, new = (z.view(batch, 2 * pairs, block, length) for z in (Y, X))
            steps.append(Call(torch.index_select, (old, 1, moves[turn]), {"out": new}))

    norms = R.new_zeros(batch, K)
    Zt = R.new_zeros(batch, K, K)
    steps.append(Call(_arrange, (X, powers, worst, 64 * tolerance, norms, Zt, S, W, info)))
    if vectors:
        held = R.new_empty(batch, K)
        complete = (Zt, norms, levels, held, K)
        steps.append(
            Launch(BLOCKS, "svd_complete", "float", complete, (batch * threads, 1, 1), group)
        )
        steps.append(Call(_finish, (Zt, info, Z, W)))
    return steps


def _tournament(pairs: int, device: torch.device) -> list[Tensor]:
    """Rounds in which each block meets every other once, as the moves from one to the next.

    Of two that meet, the first in the order of all comes first, so that long columns gather there.
    """
    last = 2 * pairs - 1
    rounds = []
    for turn in range(last):
        met = [(last, turn), *(((turn + k) % last, (turn - k) % last) for k in range(1, pairs))]
        rounds.append([block for both in met for block in sorted(both)])
    moves = [
        [rounds[turn].index(block) for block in rounds[(turn + 1) % last]] for turn in range(last)
    ]
    return list(torch.tensor(moves, device=device).unbind())


def _arrange(
    X: Tensor,
    powers: Tensor,
    worst: Tensor,
    limit: float,
    norms: Tensor,
    Zt: Tensor,
    S: Tensor,
    W: Tensor,
    info: Tensor,
) -> None:
    """Singular values in order, and the vectors that belong to them."""
    batch, K = S.shape
    found = torch.linalg.vector_norm(X[..., :K], dim=-1)
    vectors = X.shape[2] > K
    if vectors:
        # rows that pad X come after rows of R that are zero
        padding = X[..., 2 * K :].abs().sum(-1) > 0.5
        found = found.masked_fill(padding, -1.0)
    found, order = found.sort(dim=-1, descending=True, stable=True)
    norms.copy_(found[:, :K])
    broken = info < 0
    S.copy_((norms * powers[:, None]).masked_fill(broken[:, None], math.nan))
    failed = worst.view(-1, batch, worst.shape[1] // batch).amax(dim=(0, 2)) > limit
    info.copy_(torch.where(broken, info, failed.int()))
    if vectors:
        rows = X.gather(1, order[:, :K, None].expand(-1, -1, X.shape[2]))
        Zt.copy_(rows[..., :K] / norms[..., None])
        V = rows[..., K : 2 * K].mT
        # the roundings of many products have left V a little less than orthogonal
        W.copy_(1.5 * V - 0.5 * (V @ (V.mT @ V)))


def _finish(Zt: Tensor, info: Tensor, Z: Tensor, W: Tensor) -> None:
    broken = (info < 0)[:, None, None]
    Z.copy_(Zt.mT.masked_fill(broken, math.nan))
    W.masked_fill_(broken, math.nan)
