# SPDX-License-Identifier: MIT
"""Launches of eigh and eigvalsh."""

from typing import Any

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

FILE = "linalg/eigh.metal"
BLOCK = 32
PAIR = 2 * BLOCK
STRIP = 16


@metal_kernel("eigh")
def plan(policy: Values, A: Tensor, upper: bool) -> Planned | None:
    return _plan(policy, A, upper, vectors=True)


@metal_kernel("eigvalsh")
def plan_values(policy: Values, A: Tensor, upper: bool) -> Planned | None:
    planned = _plan(policy, A, upper, vectors=False)
    if planned is None:
        return None
    steps, (L, _, info) = planned
    return steps, (L, info)


def _plan(policy: Values, A: Tensor, upper: bool, vectors: bool) -> Planned | None:
    if A.dtype not in MSL_TYPE:
        return None
    a = (A.mT if upper else A).float().contiguous()
    n = a.shape[-1]
    L = a.new_empty(a.shape[:-1])
    Q = torch.empty_like(a) if vectors else L
    info = a.new_zeros(a.shape[:-2], dtype=torch.int32)
    batch = info.numel()
    steps: list[Step] = []
    if a.numel() == 0:
        pass
    elif n <= SIMD_WIDTH:
        lanes = next(size for size in (8, 16, 32) if n <= size)
        groups = -(-batch * lanes // SIMD_WIDTH)
        small = (a, L, Q, info, batch, n, int(vectors))
        steps.append(_launch("eigh_simdgroup", small, groups, SIMD_WIDTH, str(lanes)))
    elif n <= PAIR:
        middle = (a, L, Q, info, n, int(vectors))
        steps.append(_launch("eigh_threadgroup", middle, batch, policy["threads"]))
    else:
        steps += _blocked(policy, a, L, Q, info, vectors)
    if A.dtype == torch.float32:
        return steps, (L, Q, info)
    rounded = [torch.empty_like(x, dtype=A.dtype) for x in (L, Q)]
    steps += [Call(to.copy_, (x,)) for to, x in zip(rounded, (L, Q), strict=True)]
    return steps, (*rounded, info)


def _blocked(
    policy: Values, a: Tensor, L: Tensor, Q: Tensor, info: Tensor, vectors: bool
) -> list[Step]:
    """Sweeps over the pairs of blocks. Where a pair has nothing to rotate, its launches return at
    once: their number is fixed, and what they do is up to the matrix."""
    n, batch = a.shape[-1], info.numel()
    padded = round_up(n, PAIR)
    blocks = padded // BLOCK
    pairs, rounds, strips = blocks // 2, blocks - 1, padded // STRIP
    W, V = (a.new_empty(batch, padded, padded) for _ in range(2))
    largest, squares = a.new_empty(batch, n), a.new_empty(batch, padded)
    J = a.new_empty(batch, pairs, PAIR, PAIR)
    exponents, active = info.new_empty(batch), info.new_empty(batch, rounds, pairs)
    order = info.new_empty(batch, n)
    steps: list[Step] = [
        _launch("eigh_row_max", (a, largest, n), batch * n, SIMD_WIDTH),
        _launch(
            "eigh_pad",
            (a, largest, W, V, squares, exponents, n, padded),
            batch * padded,
            SIMD_WIDTH,
        ),
    ]
    for _ in range(policy["sweeps"]):
        for turn in range(rounds):
            block = (W, squares, J, active, n, padded, turn, policy["block_sweeps"])
            steps += [
                _launch("eigh_block", block, batch * pairs, policy["threads"]),
                _launch(
                    "eigh_rotate_rows",
                    (W, J, active, padded, turn),
                    batch * pairs * strips,
                    SIMD_WIDTH,
                ),
                _launch(
                    "eigh_rotate_columns",
                    (W, V, J, active, padded, turn, int(vectors)),
                    batch * pairs * strips * (1 + vectors),
                    SIMD_WIDTH,
                ),
            ]
    ends = (W, exponents, active, L, order, info, batch, n, padded, rounds * pairs)
    steps.append(_launch("eigh_order", ends, -(-batch * n // SIMD_WIDTH), SIMD_WIDTH))
    if vectors:
        # one Newton step, V (3 - V^T V) / 2, takes back what rounding did to lengths and angles
        straight = torch.empty_like(V)
        steps.append(Call(torch.bmm, (V.mT, V), {"out": W}))
        steps.append(Call(torch.baddbmm, (V, V, W), {"beta": 1.5, "alpha": -0.5, "out": straight}))
        size, group = Q.numel(), policy["threads"]
        columns = (straight, order, exponents, Q, size, n, padded)
        steps.append(_launch("eigh_columns", columns, -(-size // group), group))
    return steps


def _launch(
    function: str, args: tuple[Any, ...], groups: int, group: int, variant: str = "float"
) -> Launch:
    return Launch(FILE, function, variant, args, (groups * group, 1, 1), (group, 1, 1))
