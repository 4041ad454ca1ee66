# SPDX-License-Identifier: MIT
"""Programs of attention and attention_backward."""

from typing import Any, NamedTuple

import torch

from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import (
    MAX_THREADGROUP_BYTES,
    MAX_UINT,
    MSL_TYPE,
    SIMD_WIDTH,
    Arguments,
    Buffer,
    Program,
    round_up,
)

FILE = "attention/attention.metal"
BACKWARD = "attention/attention_backward.metal"
# Side of the tiles that a simdgroup multiplies.
TILE = 8
# A row of sums in registers; more would not fit beside what is worked with.
MOST_VALUES = 256


class Shape(NamedTuple):
    """Sizes of heads and values, rounded up to tiles, and how a threadgroup shares the rows."""

    head: int
    values: int
    simdgroups: int
    columns: int

    @property
    def width(self) -> int:
        return max(self.head, self.values)

    @property
    def rows(self) -> int:
        return TILE * self.simdgroups


def are_far(*tensors: Buffer) -> bool:
    """Whether rows of a head are further apart than kernels count, in 32 bits."""
    return any(x.shape[2] * x.stride[2] > MAX_UINT for x in tensors)


class Problem:
    """The arguments of attention as its kernels take them."""

    def __init__(self, p: Program, a: Arguments) -> None:
        self.p, self.a = p, a
        self.q, self.k, self.v = (self._rows(x) for x in (a.q, a.k, a.v))
        self.entries, self.heads, self.queries, self.size = a.q.shape
        _, self.key_heads, self.keys, self.value_size = a.v.shape
        self.dtype = a.q.dtype
        self.is_packed = a.cu_seqlens_q is not None

    def _rows(self, x: Buffer) -> Buffer:
        """Rows without gaps, at any strides."""
        return x if x.stride[-1] == 1 or x.shape[-1] == 1 else self.p.dense(x)

    def inputs(self) -> tuple[Buffer, ...]:
        """Of every kernel: q, k, v, mask, slopes, sinks and starts; what is absent is not read."""
        p, a = self.p, self.a
        nothing = p.new((1,))
        starts = [
            p.new((1,), torch.int32) if s is None else p.dense(s, torch.int32)
            for s in (a.cu_seqlens_q, a.cu_seqlens_k)
        ]
        mask = p.new((1,), torch.bool) if a.mask is None else a.mask.memory()
        per_head = (
            nothing if x is None else p.dense(x, torch.float32) for x in (a.alibi_slopes, a.sinks)
        )
        return *(x.memory() for x in (self.q, self.k, self.v)), mask, *per_head, *starts

    def sizes(self) -> tuple[int, ...]:
        a = self.a
        sequences = a.cu_seqlens_q.numel - 1 if self.is_packed else 1
        group = self.heads // self.key_heads
        limits = (a.left or 0, a.right or 0)
        return (
            *(self.heads, group, self.queries, self.keys, self.size, self.value_size),
            *(*(min(n, 1 << 30) for n in limits), sequences),
        )

    def strides(self) -> tuple[int, ...]:
        a = self.a
        mask = (0,) * 4 if a.mask is None else _broadcast_strides(a.mask)
        slopes = a.alibi_slopes
        slope = slopes.shape[-1] if slopes is not None and len(slopes.shape) == 2 else 0
        each = (s for x in (self.q, self.k, self.v) for s in x.stride[:3])
        return *each, *mask, slope

    def variant(self, shape: Shape) -> tuple[str | int, ...]:
        a = self.a
        mask = "bool" if a.mask is None or a.mask.dtype == torch.bool else MSL_TYPE[a.mask.dtype]
        flags = (a.mask, a.left, a.right, a.softcap, a.alibi_slopes)
        sizes = (shape.head, shape.values, shape.width, shape.simdgroups, shape.columns)
        return MSL_TYPE[self.dtype], mask, *sizes, *(x is not None for x in flags)

    def cap(self) -> float:
        return 1.0 if self.a.softcap is None else float(self.a.softcap)

    def tiles(self, rows: int, per_tile: int) -> int:
        """Enough for packed sequences of any lengths, each with a last tile of its own."""
        extra = self.a.cu_seqlens_q.numel - 1 if self.is_packed else 0
        return -(-rows // per_tile) + extra

    def laid_out(self, rows: int, heads: int, width: int) -> Buffer:
        """[entries, heads, rows, width], in memory by rows first."""
        return self.p.new((self.entries, rows, heads, width), self.dtype)


def _broadcast_strides(mask: Buffer) -> tuple[int, ...]:
    return tuple(0 if n == 1 else s for n, s in zip(mask.shape, mask.stride, strict=True))


def _forward_shape(head: int, values: int, itemsize: int) -> Shape | None:
    head, values = round_up(max(head, 1), TILE), round_up(max(values, 1), TILE)
    width = max(head, values)
    simdgroups = 4 if width <= 128 else 2 if width <= 256 else 1
    columns = 32 if width <= 64 else 16 if width <= 128 else 8
    used = (TILE * simdgroups * head + columns * width) * itemsize + 4 * simdgroups
    if values > MOST_VALUES or used > MAX_THREADGROUP_BYTES:
        return None
    return Shape(head, values, simdgroups, columns)


@metal_kernel("attention")
def forward(p: Program, a: Arguments) -> Any:
    this = Problem(p, a)
    out = this.laid_out(this.queries, this.heads, this.value_size)
    lse = p.new((this.entries, this.heads, this.queries))
    if lse.numel == 0:
        return out.transpose(1, 2), lse
    shape = _forward_shape(this.size, this.value_size, this.q.dtype.itemsize)
    if shape is None or are_far(this.q, this.k, this.v):
        return NotImplemented
    args = (*this.inputs(), out, lse, this.sizes(), this.strides(), a.scale, this.cap())
    variant = (*this.variant(shape), a.sinks is not None, this.is_packed)
    group = SIMD_WIDTH * shape.simdgroups
    grid = (this.tiles(this.queries, shape.rows) * group, this.heads, this.entries)
    p.launch(FILE, "attention", variant, args, grid, (group, 1, 1))
    return out.transpose(1, 2), lse


def _backward_shape(head: int, values: int, itemsize: int) -> Shape | None:
    head, values = round_up(max(head, 1), TILE), round_up(max(values, 1), TILE)
    width = max(head, values)
    simdgroups = 4 if width <= 64 else 2 if width <= 128 else 1
    columns = 16 if width <= 64 else 8
    used = (TILE * simdgroups + columns) * (head + values) * itemsize + 8 * columns
    return Shape(head, values, simdgroups, columns) if used <= MAX_THREADGROUP_BYTES else None


@metal_kernel("attention_backward")
def backward(p: Program, a: Arguments) -> Any:
    this = Problem(p, a)
    dq = this.laid_out(this.queries, this.heads, this.size)
    dk = this.laid_out(this.keys, this.key_heads, this.size)
    dv = this.laid_out(this.keys, this.key_heads, this.value_size)
    grads = (dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2))
    dsinks = p.new((0 if a.sinks is None else this.heads,))
    shape = _backward_shape(this.size, this.value_size, this.q.dtype.itemsize)
    dout = this._rows(a.dout)
    is_far = are_far(this.q, this.k, this.v, dout)
    if shape is None or a.lse.dtype != torch.float32 or is_far:
        return NotImplemented
    if a.lse.numel == 0 or this.keys == 0:
        for x in (dq, dk, dv, dsinks):
            p.fill(x, 0.0)
        return *grads, p.rounded(dsinks, this.dtype if a.sinks is None else a.sinks.dtype)
    lse = p.dense(a.lse)
    delta = _delta(p, a, this, dout, lse)
    inputs = this.inputs()
    numbers = (this.sizes(), this.strides(), (*dout.stride[:3], *(0,) * 11), a.scale, this.cap())
    given = (*inputs, dout.memory(), lse, delta)
    group = SIMD_WIDTH * shape.simdgroups
    variant = (*this.variant(shape), this.is_packed)
    grid = (this.tiles(this.queries, shape.rows) * group, this.heads, this.entries)
    p.launch(BACKWARD, "attention_dq", variant, (*given, dq, *numbers), grid, (group, 1, 1))
    grid = (this.tiles(this.keys, shape.rows) * group, this.key_heads, this.entries)
    both = shape.head + shape.values <= MOST_VALUES
    for parts in ((True, True),) if both else ((True, False), (False, True)):
        args = (*given, dk, dv, *numbers)
        p.launch(BACKWARD, "attention_dkv", (*variant, *parts), args, grid, (group, 1, 1))
    if a.sinks is not None:
        sizes = (this.entries, this.heads, this.queries)
        args = (inputs[5], lse, delta, dsinks, *sizes)
        threads = p.policy["threads"]
        p.launch(BACKWARD, "attention_dsinks", (threads,), args, this.heads * threads, threads)
    return *grads, p.rounded(dsinks, this.dtype if a.sinks is None else a.sinks.dtype)


def _delta(p: Program, a: Arguments, this: Problem, dout: Buffer, lse: Buffer) -> Buffer:
    """sum(dout * out) - dlse of every query."""
    delta = p.new_like(lse)
    out = a.out.transpose(1, 2)
    out = out if out.is_contiguous else p.copy(p.new_like(out), out)
    dlse = delta if a.dlse is None else p.dense(a.dlse)
    sizes = (*this.sizes()[:8], this.entries)
    simdgroups = p.policy["simdgroups"]
    group = SIMD_WIDTH * simdgroups
    args = (dout.memory(), out, dlse, lse, delta, sizes, (*dout.stride[:3], *(0,) * 11))
    variant = (MSL_TYPE[this.dtype], a.dlse is not None, simdgroups)
    threads = round_up(lse.numel * SIMD_WIDTH, group)
    p.launch(BACKWARD, "attention_delta", variant, args, threads, group)
    return delta
