# SPDX-License-Identifier: MIT
"""Programs of mlstm_chunkwise and mlstm_chunkwise_backward."""

from typing import Any

import torch

from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import MSL_TYPE, SIMD_WIDTH, Arguments, Buffer, Program

FILE = "xlstm/mlstm_chunkwise.metal"
BACKWARD = "xlstm/mlstm_chunkwise_backward.metal"
TILE = 8
# Steps of a chunk: as many pairs of them as registers hold beside a row of results.
STEPS = 32
# Columns of a state that a simdgroup keeps.
COLUMNS = 32


class Problem:
    """The arguments of the mLSTM as its kernels take them."""

    def __init__(self, p: Program, a: Arguments) -> None:
        self.p, self.a = p, a
        self.q, self.k, self.v = p.dense(a.q), p.dense(a.k), p.dense(a.v)
        self.entries, self.heads, self.steps, self.size = a.q.shape
        self.values = a.v.shape[3]
        self.dtype = MSL_TYPE[a.q.dtype]
        self.simdgroups = p.policy["simdgroups"]
        self.chunks = -(-self.steps // STEPS)
        self.has_state = a.c is not None
        self.each = (self.entries * self.heads, self.steps)
        """Of numbers for each step."""
        self.m0 = self.given(a.m, ())

    def given(self, x: Buffer | None, size: tuple[int, ...]) -> Buffer:
        """A part of the states of all heads, zeros where there are none."""
        if x is not None:
            return self.p.dense(x)
        return self.p.fill(self.p.new((self.entries, self.heads, *size)), 0.0)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.steps, self.size, self.values, self.heads, self.chunks

    def gates(self) -> tuple[Buffer, Buffer, Buffer]:
        """w and c, as two floats each, and m of every step."""
        p, a = self.p, self.a
        dtype = a.i.dtype if a.i.dtype == a.f.dtype else torch.float32
        w, c = p.new((*self.each, 2)), p.new((*self.each, 2))
        m = p.new(self.each)
        args = (p.dense(a.i, dtype), p.dense(a.f, dtype), self.m0, w, c, m, self.steps)
        variant = (MSL_TYPE[dtype], a.sigmoid)
        p.launch(FILE, "mlstm_gates", variant, args, self.each[0] * SIMD_WIDTH, SIMD_WIDTH)
        return w, c, m

    def states(
        self,
        gates: tuple[Buffer, Buffer],
        left: Buffer,
        right: Buffer,
        start: tuple[Buffer | None, Buffer | None],
        rows: tuple[Buffer, Buffer] | None = None,
    ) -> Buffer:
        """States before all chunks and after them; where `rows` are given, their gradients."""
        p = self.p
        found = p.new((self.each[0], self.chunks + 1, self.size, self.values + 1))
        c0 = self.given(start[0], (self.size, self.values))
        n0 = self.given(start[1], (self.size,))
        share, dl = rows or (n0, n0)
        args = (left, right, share, dl, *gates, self.m0, c0, n0, found, self.sizes)
        tiles = -(-self.size // (TILE * self.simdgroups))
        blocks = -(-(self.values + 1) // COLUMNS)
        group = SIMD_WIDTH * self.simdgroups
        grid = (tiles * group, blocks, self.each[0])
        variant = (self.dtype, STEPS, self.simdgroups, rows is not None)
        p.launch(FILE, "mlstm_states", variant, args, grid, (group, 1, 1))
        return found

    def rows_grid(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """A simdgroup for each eight steps."""
        group = SIMD_WIDTH * self.simdgroups
        groups = -(-self.steps // (TILE * self.simdgroups))
        return (groups * group, self.each[0], 1), (group, 1, 1)

    def laid_out(self, width: int) -> Buffer:
        """[entries, heads, steps, width], in memory by steps first."""
        return self.p.new((self.entries, self.steps, self.heads, width), self.a.q.dtype)


def _is_declined(a: Arguments) -> bool:
    """Packed sequences, and states that are not whole."""
    return a.cu_seqlens is not None or len({x is None for x in (a.c, a.n, a.m)}) == 2


@metal_kernel("mlstm_chunkwise")
def forward(p: Program, a: Arguments) -> Any:
    if _is_declined(a):
        return NotImplemented
    this = Problem(p, a)
    h = this.laid_out(this.values)
    shape = (this.entries, this.heads)
    c_last, n_last = p.new((*shape, this.size, this.values)), p.new((*shape, this.size))
    m_last = p.new(shape)
    outputs = (h.transpose(1, 2), c_last, n_last, m_last)
    if this.each[0] == 0:
        return outputs
    if this.steps == 0:
        for to, given in zip(outputs[1:], (a.c, a.n, a.m), strict=True):
            _ = p.fill(to, 0.0) if given is None else p.copy(to, given)
        return outputs
    w, c, m = this.gates()
    states = this.states((w, c), this.k, this.v, (a.c, a.n))
    args = (this.q, this.k, this.v, w, c, m, this.m0, states, h, this.sizes, a.eps)
    variant = (this.dtype, STEPS, this.simdgroups, a.normalize)
    if h.numel:
        p.launch(FILE, "mlstm_output", variant, args, *this.rows_grid())
    last = states[:, this.chunks]
    p.copy(c_last.view(this.each[0], this.size, this.values), last[:, :, : this.values])
    p.copy(n_last.view(this.each[0], this.size), last[:, :, this.values])
    p.copy(m_last.view(this.each[0]), m[:, this.steps - 1])
    return outputs


@metal_kernel("mlstm_chunkwise_backward")
def backward(p: Program, a: Arguments) -> Any:
    if _is_declined(a):
        return NotImplemented
    this = Problem(p, a)
    heads = this.each[0]
    dq, dk, dv = (this.laid_out(x) for x in (this.size, this.size, this.values))
    gate = a.i.dtype if a.i.dtype == a.f.dtype else torch.float32
    di, df = p.new(a.i.shape, gate), p.new(a.i.shape, gate)
    nothing = p.new((0,), a.dh.dtype)
    dstates = [nothing if x is None else p.new(x.shape) for x in (a.c, a.n, a.m)]
    grads = tuple(x.transpose(1, 2) for x in (dq, dk, dv))
    if heads and this.steps:
        _launch_backward(p, a, this, (dq, dk, dv), (di, df), dstates)
    elif heads and this.has_state:
        for to, given in zip(dstates, (a.dc_last, a.dn_last, a.dm_last), strict=True):
            _ = p.fill(to, 0.0) if given is None else p.copy(to, given)
    return *grads, p.rounded(di, a.i.dtype), p.rounded(df, a.f.dtype), *dstates


def _launch_backward(
    p: Program,
    a: Arguments,
    this: Problem,
    grads: tuple[Buffer, Buffer, Buffer],
    dgates: tuple[Buffer, Buffer],
    dstates: list[Buffer],
) -> None:
    dh, steps, simdgroups = p.dense(a.dh), this.steps, this.simdgroups
    w, c, m = this.gates()
    inputs = (this.q, this.k, this.v, dh)
    states = this.states((w, c), this.k, this.v, (a.c, a.n))
    share, dl, of_m = (p.new(this.each) for _ in range(3))
    args = (*inputs, w, c, m, this.m0, states, share, dl, of_m, this.sizes, a.eps)
    variant = (this.dtype, STEPS, simdgroups, a.normalize, not a.nx, a.sigmoid)
    p.launch(BACKWARD, "mlstm_rows", variant, args, *this.rows_grid())
    of_states = this.states((w, c), this.q, dh, (a.dc_last, a.dn_last), (share, dl))
    of_q, of_k = p.new(this.each), p.new(this.each)
    results = ((grads[0], of_q, states), (grads[1], of_k, of_states), (grads[2], of_k, of_states))
    for number, (result, products, memory) in enumerate(results):
        rows = (share, dl, w, c, this.m0, memory, result, products, this.sizes)
        kind = (this.dtype, number, STEPS, simdgroups)
        if result.numel:
            p.launch(BACKWARD, "mlstm_gradient", kind, (*inputs, *rows), *this.rows_grid())
    number = this.each[0] * (this.chunks + 1)
    inner, threads = p.new((number,)), p.policy["threads"]
    each = this.size * (this.values + 1)
    sums = (states, of_states, inner, each)
    p.launch(BACKWARD, "mlstm_inner", (threads,), sums, number * threads, threads)
    di, df = dgates
    dm = p.new((this.each[0],))
    given = (p.dense(a.i, di.dtype), p.dense(a.f, df.dtype), c, this.m0, of_q, of_k, of_m, inner)
    last = (this.given(a.dm_last, ()), di, df, dm, steps)
    form = (MSL_TYPE[di.dtype], STEPS, not a.nx, a.sigmoid)
    grid = this.each[0] * SIMD_WIDTH
    p.launch(BACKWARD, "mlstm_gate_gradients", form, (*given, *last), grid, SIMD_WIDTH)
    if this.has_state:
        first = of_states[:, 0]
        p.copy(dstates[0].view(this.each[0], this.size, this.values), first[:, :, : this.values])
        p.copy(dstates[1].view(this.each[0], this.size), first[:, :, this.values])
        p.copy(dstates[2].view(this.each[0]), dm)
