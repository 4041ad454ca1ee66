# SPDX-License-Identifier: MIT
"""Launches of svd and svdvals."""

import math

import torch
from torch import Tensor

from metalcore._policy import Values
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

FILE = "linalg/svd.metal"

# Columns of a pair of blocks, at most: their Gram matrix and its rotations fill threadgroup memory.
_PAIR = 48
# The simdgroups of a threadgroup share 16 KiB.
_SIMDGROUPS = 4


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


def _decompose(
    policy: Values, A: Tensor, full: bool, vectors: bool
) -> tuple[list[Step], tuple[Tensor, Tensor, Tensor, Tensor]]:
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
        if max(rows, columns) <= SIMD_WIDTH:
            steps.append(_simdgroup(policy, x, (U, S, V, info), vectors))
        else:
            flat_U, flat_V = (y.flatten(0, -3) if y.dim() > 2 else y for y in (U, V))
            steps += _blocked(policy, x, (flat_U, S.view(-1, K), flat_V, info.view(-1)), vectors)
    if A.dtype == torch.float32:
        return steps, (U, S, V, info)
    rounded = [torch.empty_like(y, dtype=A.dtype) for y in (U, S, V)]
    steps += [Call(to.copy_, (y,)) for to, y in zip(rounded, (U, S, V), strict=True)]
    return steps, (*rounded, info)  # type: ignore[return-value]


def _tolerance(rows: int) -> float:
    """The cosine of an angle that counts as right: a few roundings of a sum over the rows."""
    return 1e-7 * max(1.0, math.sqrt(rows) / 8)


def _simdgroup(
    policy: Values, A: Tensor, out: tuple[Tensor, Tensor, Tensor, Tensor], vectors: bool
) -> Launch:
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


def _blocked(
    policy: Values, A: Tensor, out: tuple[Tensor, Tensor, Tensor, Tensor], vectors: bool
) -> list[Step]:
    batch, rows, columns = A.shape
    wide = rows < columns
    U, S, V, info = out
    tall, square = (V, U) if wide else (U, V)
    M, K = max(rows, columns), min(rows, columns)
    pairs = -(-K // _PAIR)
    block = -(-K // (2 * pairs))
    size, P = 2 * block, 2 * block * pairs
    length = M + P if vectors else M
    tolerance = _tolerance(M)

    # Z = [X | V^T]: a row per column of A, padded with zeros
    Z, Y = (A.new_zeros(batch, P, length) for _ in range(2))
    gram, turns = (A.new_empty(batch * pairs, size, size) for _ in range(2))
    worst = A.new_empty(2 * pairs - 1, batch * pairs)
    powers, levels = (A.new_empty(batch) for _ in range(2))
    threads = policy["threads"]
    group = (threads, 1, 1)
    steps: list[Step] = [Call(Z[:, :K, :M].copy_, (A if wide else A.mT,))]
    if vectors:
        steps.append(Call(Z[:, :, M:].diagonal(dim1=1, dim2=2).fill_, (1.0,)))
    begin = (Z, powers, levels, info, P, M, length, K)
    steps.append(Launch(FILE, "svd_begin", "float", begin, (batch * threads, 1, 1), group))

    blocks = Z.view(batch * pairs, size, length)
    turned = Y.view(batch * pairs, size, length)
    moves = _tournament(pairs, A.device)
    for _ in range(policy["sweeps"]):
        for turn in range(2 * pairs - 1):
            X = blocks[..., :M]
            steps.append(Call(torch.bmm, (X, X.mT), {"out": gram}))
            pair = (gram, turns, worst[turn], levels, pairs, size, policy["pair_sweeps"], tolerance)
            grid = (batch * pairs * threads, 1, 1)
            steps.append(Launch(FILE, "svd_pair", "float", pair, grid, group))
            steps.append(Call(torch.bmm, (turns, blocks), {"out": turned}))
            old, new = (z.view(batch, 2 * pairs, block, length) for z in (Y, Z))
            steps.append(Call(torch.index_select, (old, 1, moves[turn]), {"out": new}))

    norms = A.new_zeros(batch, K)
    Ut = A.new_zeros(batch, tall.shape[-1] if vectors else 1, M)
    steps.append(Call(_arrange, (Z, powers, worst, 64 * tolerance, norms, Ut, S, square, info)))
    if vectors:
        held = A.new_empty(batch, Ut.shape[1])
        complete = (Ut, norms, levels, held, M, Ut.shape[1], K)
        steps.append(
            Launch(FILE, "svd_complete", "float", complete, (batch * threads, 1, 1), group)
        )
        steps.append(Call(_finish, (Ut, info, tall, square)))
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
    Z: Tensor,
    powers: Tensor,
    worst: Tensor,
    limit: float,
    norms: Tensor,
    Ut: Tensor,
    S: Tensor,
    square: Tensor,
    info: Tensor,
) -> None:
    """Singular values in order, and the vectors that belong to them."""
    batch, K = S.shape
    M = Ut.shape[2]
    found = torch.linalg.vector_norm(Z[..., :M], dim=-1)
    vectors = Z.shape[2] > M
    if vectors:
        # rows that pad Z come after columns of A that are zero
        padding = Z[..., M + K :].abs().sum(-1) > 0.5
        found = found.masked_fill(padding, -1.0)
    found, order = found.sort(dim=-1, descending=True, stable=True)
    norms.copy_(found[:, :K])
    broken = info < 0
    S.copy_((norms * powers[:, None]).masked_fill(broken[:, None], math.nan))
    failed = worst.view(-1, batch, worst.shape[1] // batch).amax(dim=(0, 2)) > limit
    info.copy_(torch.where(broken, info, failed.int()))
    if vectors:
        rows = Z.gather(1, order[:, :K, None].expand(-1, -1, Z.shape[2]))
        Ut[:, :K].copy_(rows[..., :M] / norms[..., None])
        V = rows[..., M : M + K].mT
        # the roundings of many products have left V a little less than orthogonal
        square.copy_(1.5 * V - 0.5 * (V @ (V.mT @ V)))


def _finish(Ut: Tensor, info: Tensor, tall: Tensor, square: Tensor) -> None:
    broken = (info < 0)[:, None, None]
    tall.copy_(Ut.mT.masked_fill(broken, math.nan))
    square.masked_fill_(broken, math.nan)
