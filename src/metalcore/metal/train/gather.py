# SPDX-License-Identifier: MIT
"""Programs of gather, index_select and scatter_add."""

from functools import partial

import torch
from torch import Tensor

from metalcore._check import refuse_index
from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import MAX_UINT, MSL_TYPE, Arguments, Buffer, Program
from metalcore.metal.train._elementwise import in_neighbours

FILE = "train/gather.metal"


@metal_kernel("gather")
def gather(p: Program, a: Arguments) -> Buffer:
    return _pick(p, a, "gather", a.index.shape[1])


@metal_kernel("index_select")
def select(p: Program, a: Arguments) -> Buffer:
    return _pick(p, a, "index_select", a.index.numel)


def _pick(p: Program, a: Arguments, op: str, count: int) -> Buffer:
    x, index = p.dense(a.x), p.dense(a.index)
    outer, size, inner = x.shape
    y = p.new((outer, count, inner), x.dtype)
    if y.numel:
        wrong = p.fill(p.new((1,), torch.int32), 0)
        variant = (MSL_TYPE[x.dtype], _place(x, y), op == "gather")
        args = (x, index, y, wrong, size, count, inner)
        p.launch(FILE, "gather", variant, args, *in_neighbours(p, (inner, count, outer)))
        p.check(partial(_refuse_picked, op, size), wrong, index)
    return y


def _refuse_picked(op: str, size: int, wrong: Tensor, index: Tensor) -> None:
    place = int(wrong)
    if place:
        refuse_index(op, int(index.reshape(-1)[place - 1]), f"a dimension of {size}")


@metal_kernel("scatter_add")
def scatter_add(p: Program, a: Arguments) -> Buffer:
    x, src = p.dense(a.x), p.dense(a.src)
    (outer, size, inner), count = x.shape, a.index.shape[1]
    y = p.new_like(x)
    if x.numel == 0 or count == 0:
        return p.copy(y, x)
    in_order, order = p.sort(p.dense(a.index.transpose(1, 2)))
    wrong = p.fill(p.new((1,), torch.int32), 0)
    args = (x, in_order, order, src, y, wrong, size, count, inner)
    variant = (MSL_TYPE[x.dtype], _place(x, src))
    p.launch(FILE, "scatter_add", variant, args, *in_neighbours(p, (inner, size, outer)))
    p.check(partial(_refuse_scattered, size), wrong, in_order)
    return y


def _refuse_scattered(size: int, wrong: Tensor, in_order: Tensor) -> None:
    if int(wrong):
        low, high = int(in_order.min()), int(in_order.max())
        refuse_index("scatter_add", low if low < 0 else high, f"a dimension of {size}")


def _place(*buffers: Buffer) -> str:
    """What counts the values of all these."""
    return "uint" if all(b.numel <= MAX_UINT for b in buffers) else "ulong"
