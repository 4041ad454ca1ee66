# SPDX-License-Identifier: MIT
"""Launches of gather, index_select and scatter_add."""

import torch
from torch import Tensor

from metalcore._check import refuse_index
from metalcore._policy import Values
from metalcore.metal.launch import (
    MSL_TYPE,
    SIMD_WIDTH,
    Call,
    Launch,
    Planned,
    metal_kernel,
    round_up,
)

FILE = "train/gather.metal"


def _grid(policy: Values, inner: int, rows: int) -> tuple[tuple[int, int, int], ...]:
    lanes = min(policy["threads"], round_up(inner, SIMD_WIDTH))
    return (round_up(inner, lanes), rows, 1), (lanes, 1, 1)


@metal_kernel("gather")
def plan_gather(policy: Values, x: Tensor, index: Tensor) -> Planned | None:
    return _pick("gather", policy, x, index, index.shape[1], per_value=1)


@metal_kernel("index_select")
def plan_select(policy: Values, x: Tensor, index: Tensor) -> Planned | None:
    return _pick("index_select", policy, x, index, index.numel(), per_value=0)


def _pick(
    op: str, policy: Values, x: Tensor, index: Tensor, count: int, per_value: int
) -> Planned | None:
    if x.dtype not in MSL_TYPE:
        return None
    x, index = x.contiguous(), index.contiguous()
    outer, size, inner = x.shape
    y = x.new_empty((outer, count, inner))
    if y.numel() == 0:
        return [], y
    wrong = torch.zeros(1, dtype=torch.int32, device=x.device)
    threads, group = _grid(policy, inner, outer * count)
    launch = Launch(
        FILE,
        "gather",
        MSL_TYPE[x.dtype],
        (x, index, y, wrong, size, count, inner, per_value),
        threads=threads,
        group=group,
    )
    return [launch, Call(_refuse, (op, index, size, wrong))], y


def _refuse(op: str, index: Tensor, size: int, wrong: Tensor) -> None:
    place = int(wrong.item())
    if place:
        refuse_index(op, int(index.view(-1)[place - 1]), f"a dimension of {size}")


@metal_kernel("scatter_add")
def plan_scatter_add(policy: Values, x: Tensor, index: Tensor, src: Tensor) -> Planned | None:
    if x.dtype not in MSL_TYPE:
        return None
    x, index, src = x.contiguous(), index.contiguous(), src.contiguous()
    (_, size, inner), count = x.shape, index.shape[1]
    y = torch.empty_like(x)
    if x.numel() == 0 or count == 0:
        return [], y.copy_(x)
    in_order, order = torch.sort(index, dim=1, stable=True)
    low, high = int(in_order[:, 0].min()), int(in_order[:, -1].max())
    if low < 0 or high >= size:
        refuse_index("scatter_add", low if low < 0 else high, f"a dimension of {size}")
    threads, group = _grid(policy, inner, x.shape[0] * size)
    launch = Launch(
        FILE,
        "scatter_add",
        MSL_TYPE[x.dtype],
        (x, in_order.contiguous(), order.contiguous(), src, y, size, count, inner),
        threads=threads,
        group=group,
    )
    return [launch], y
