# SPDX-License-Identifier: MIT
"""Launches of cholesky."""

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
)

FILE = "linalg/cholesky.metal"

# Columns that a threadgroup factors, and values that the memory of cholesky_simdgroup holds.
BLOCK = 64
_TILE = 4224


@metal_kernel("cholesky")
def plan(policy: Values, A: Tensor, upper: bool) -> Planned | None:
    if A.dtype not in MSL_TYPE:
        return None
    n, batch = A.shape[-1], A.shape[:-2]
    out = A.new_empty(A.shape)
    info = A.new_empty(batch, dtype=torch.int32)
    if A.numel() == 0:
        return [], (out, info.zero_())
    a = (A.mT if upper else A).float().contiguous().view(-1, n, n)
    plain = A.dtype == torch.float32 and not upper
    L = out.view(-1, n, n) if plain else torch.empty_like(a)
    if n <= SIMD_WIDTH:
        todo = [_simdgroup(a, L, info.view(-1), policy["simdgroups"])]
    elif n <= BLOCK:
        todo = [_threadgroup(a, L, info.view(-1), 0)]
    else:
        todo = [Call(L.copy_, (a,)), *_blocks(L, info.view(-1)), Call(L.tril_, ())]
    if not plain:
        todo.append(Call(out.copy_, ((L.mT if upper else L).view_as(A),)))
    return todo, (out, info)


def _simdgroup(A: Tensor, L: Tensor, info: Tensor, simdgroups: int) -> Step:
    batch, n, _ = A.shape
    width = next(w for w in (8, 16, 32) if n <= w)
    share = SIMD_WIDTH // width
    fit = min(simdgroups, _TILE // (share * width * (width + 1)))
    groups = -(-batch // (share * fit))
    return Launch(
        FILE,
        "cholesky_simdgroup",
        f"{width}",
        (A, L, info, batch, n),
        threads=(groups * fit * SIMD_WIDTH, 1, 1),
        group=(fit * SIMD_WIDTH, 1, 1),
    )


def _threadgroup(A: Tensor, L: Tensor, info: Tensor, start: int) -> Step:
    batch, order, _ = A.shape
    return Launch(
        FILE,
        "cholesky_threadgroup",
        f"{BLOCK}",
        (A, L, info, min(BLOCK, order - start), start, order),
        threads=(batch * BLOCK, 1, 1),
        group=(BLOCK, 1, 1),
    )


def _blocks(L: Tensor, info: Tensor) -> list[Step]:
    """Factor in place: the block on the diagonal, the rows below it, then what is left."""
    batch, order, _ = L.shape
    todo: list[Step] = []
    for start in range(0, order, BLOCK):
        todo.append(_threadgroup(L, L, info, start))
        stop = start + BLOCK
        if stop < order:
            groups = -(-(order - stop) // SIMD_WIDTH)
            todo.append(
                Launch(
                    FILE,
                    "cholesky_panel",
                    f"{BLOCK}",
                    (L, start, order),
                    threads=(groups * SIMD_WIDTH, batch, 1),
                    group=(SIMD_WIDTH, 1, 1),
                )
            )
            panel = L[:, stop:, start:stop]
            todo.append(Call(L[:, stop:, stop:].baddbmm_, (panel, panel.mT), {"alpha": -1}))
    return todo
