# SPDX-License-Identifier: MIT
"""Programs of slstm and slstm_backward."""

from typing import Any

import torch

from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import MSL_TYPE, SIMD_WIDTH, Arguments, Buffer, Program, round_up

FILE = "xlstm/slstm.metal"
# Values of a head that threadgroup memory has room for.
_MOST = 1024
# What is kept of each step and column.
_KEPT = 7


class Problem:
    """The arguments of the sLSTM as its kernels take them."""

    def __init__(self, p: Program, a: Arguments) -> None:
        self.p, self.a = p, a
        self.x = p.dense(a.x)
        self.entries, self.steps, _, self.heads, self.size = a.x.shape
        dtype = a.recurrent.dtype
        if a.bias is not None and a.bias.dtype != dtype:
            dtype = torch.float32
        self.recurrent = p.dense(a.recurrent, dtype)
        self.bias = self.recurrent if a.bias is None else p.dense(a.bias, dtype)
        self.types = (MSL_TYPE[self.x.dtype], MSL_TYPE[dtype])
        # arrays of a few sizes, so that there are few kernels
        self.room = max(SIMD_WIDTH, 1 << (self.size - 1).bit_length())
        self.given = a.states is not None
        self.states = p.dense(a.states) if self.given else self.filler()

    def filler(self) -> Buffer:
        """In the place of a float buffer that a kernel does not look at."""
        return self.p.new((1,))

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.entries, self.steps, self.heads, self.size

    @property
    def is_empty(self) -> bool:
        return bool(self.entries * self.heads == 0)

    def run(self, y: Buffer, last: Buffer, kept: Buffer | None, before: Buffer | None) -> None:
        """All steps: their results, or what the gradient needs of them."""
        p = self.p
        lanes = min(p.policy["lanes"], round_up(self.size, SIMD_WIDTH))
        variant = (*self.types, self.room, lanes, self.a.bias is not None, self.given)
        keeps = kept is not None
        others = (kept or self.filler(), before or self.filler())
        args = (self.x, self.recurrent, self.bias, self.states, y, last, *others, self.sizes)
        grid = (lanes, 4 * self.heads, self.entries)
        p.launch(FILE, "slstm", (*variant, keeps), args, grid, (lanes, 4, 1))


@metal_kernel("slstm")
def forward(p: Program, a: Arguments) -> Any:
    this = Problem(p, a)
    if this.size > _MOST:
        return NotImplemented
    y = p.new((this.entries, this.steps, this.heads, this.size), a.x.dtype)
    last = p.new((this.entries, 4, this.heads, this.size))
    if this.steps == 0:
        _ = p.copy(last, a.states) if this.given else p.fill(last, 0.0)
    elif not this.is_empty:
        this.run(y, last, None, None)
    return y, last


@metal_kernel("slstm_backward")
def backward(p: Program, a: Arguments) -> Any:
    this = Problem(p, a)
    if this.size > _MOST:
        return NotImplemented
    heads, size, rows = this.heads, this.size, this.entries * this.steps
    nothing = p.new((0,), a.dy.dtype)
    dx = p.new_like(this.x)
    dR, db = p.new((heads, size, 4 * size)), p.new((heads, 1, 4 * size))
    dstates = p.new(a.states.shape) if this.given else nothing
    if rows * heads == 0:
        p.fill(dR, 0.0)
        p.fill(db, 0.0)
        if this.given:
            _ = p.fill(dstates, 0.0) if a.dlast is None else p.copy(dstates, a.dlast)
    else:
        _launch_backward(p, a, this, dx, dR, db, dstates)
    dR = p.rounded(dR.view(heads, size, 4, size), a.recurrent.dtype)
    dbias = nothing if a.bias is None else p.rounded(db.view(heads, 4, size), a.bias.dtype)
    return dx, dR, dbias, dstates


def _launch_backward(
    p: Program, a: Arguments, this: Problem, dx: Buffer, dR: Buffer, db: Buffer, dstates: Buffer
) -> None:
    heads, size, rows = this.heads, this.size, this.entries * this.steps
    kept = p.new((this.entries, heads, this.steps, _KEPT, size))
    before, grads = p.new((heads, rows, size)), p.new((heads, rows, 4 * size))
    this.run(dx, this.filler(), kept, before)
    simdgroups = p.policy["simdgroups"]
    dlast = this.filler() if a.dlast is None else p.dense(a.dlast)
    to = dstates if this.given else this.filler()
    clip = 0.0 if a.clip is None else a.clip
    args = (p.dense(a.dy), dlast, this.recurrent, this.states, kept, dx, grads, to)
    options = (this.given, a.dlast is not None, a.clip is not None)
    variant = (*this.types, this.room, simdgroups, *options)
    grid = (SIMD_WIDTH, simdgroups * heads, this.entries)
    group = (SIMD_WIDTH, simdgroups, 1)
    p.launch(FILE, "slstm_backward", variant, (*args, this.sizes, clip), grid, group)
    p.matmul(dR, before.mT, grads)
    if a.bias is not None:
        p.matmul(db, p.fill(p.new((heads, 1, rows)), 1.0), grads)
