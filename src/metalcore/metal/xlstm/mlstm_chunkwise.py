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
    """The arguments of the mLSTM as its kernels take them.

    Of packed sequences the lengths are data. So there is room for any lengths: for each sequence
    one chunk more than there are whole ones, and one state more than that.
    """

    def __init__(self, p: Program, a: Arguments) -> None:
        self.p, self.a = p, a
        self.q, self.k, self.v = p.dense(a.q), p.dense(a.k), p.dense(a.v)
        self.entries, self.heads, self.steps, self.size = a.q.shape
        self.values = a.v.shape[3]
        self.dtype = MSL_TYPE[a.q.dtype]
        self.simdgroups = p.policy["simdgroups"]
        self.is_packed = a.cu_seqlens is not None
        if self.is_packed:
            self.starts = p.dense(a.cu_seqlens, torch.int32)
            self.sequences = self.starts.numel - 1
            self.chunks = self.steps // STEPS + self.sequences
            self.slots = self.chunks + self.sequences
        else:
            # not read
            self.starts = p.new((1,), torch.int32)
            self.sequences = self.entries
            self.chunks = -(-self.steps // STEPS)
            self.slots = self.chunks + 1
        self.has_state = a.c is not None
        self.each = (self.entries * self.heads, self.steps)
        """Of numbers for each step."""
        self.of_state = self.sequences * self.heads
        """How many states there are at first, and at last."""
        self.m0 = self.given(a.m, ())

    def given(self, x: Buffer | None, size: tuple[int, ...]) -> Buffer:
        """A part of the states of all heads, zeros where there are none."""
        if x is not None:
            return self.p.dense(x)
        return self.p.fill(self.p.new((self.sequences, self.heads, *size)), 0.0)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.steps, self.size, self.values, self.heads, self.slots, self.sequences

    def gates(self) -> tuple[Buffer, Buffer, Buffer, Buffer]:
        """w and c, as two floats each, and m of every step; and the last m."""
        p, a = self.p, self.a
        dtype = a.i.dtype if a.i.dtype == a.f.dtype else torch.float32
        w, c = p.new((*self.each, 2)), p.new((*self.each, 2))
        m, last = p.new(self.each), p.new((self.sequences, self.heads))
        given = (p.dense(a.i, dtype), p.dense(a.f, dtype), self.m0, self.starts)
        variant = (MSL_TYPE[dtype], STEPS, a.sigmoid, self.is_packed)
        args = (*given, w, c, m, last, self.sizes)
        p.launch(FILE, "mlstm_gates", variant, args, self.of_state * SIMD_WIDTH, SIMD_WIDTH)
        return w, c, m, last

    def states(
        self,
        gates: tuple[Buffer, Buffer],
        left: Buffer,
        right: Buffer,
        start: tuple[Buffer | None, Buffer | None],
        rows: tuple[Buffer, Buffer] | None = None,
    ) -> tuple[Buffer, Buffer, Buffer]:
        """States before all chunks and after them, and C and n of the last; where `rows` are given,
        their gradients, of which the last is that of the first state."""
        p = self.p
        found = p.new((self.each[0], self.slots, self.size, self.values + 1))
        end = p.new((self.sequences, self.heads, self.size, self.values))
        n_end = p.new((self.sequences, self.heads, self.size))
        c0 = self.given(start[0], (self.size, self.values))
        n0 = self.given(start[1], (self.size,))
        share, dl = rows or (n0, n0)
        given = (left, right, share, dl, *gates, self.m0, c0, n0, self.starts)
        tiles = -(-self.size // (TILE * self.simdgroups))
        blocks = -(-(self.values + 1) // COLUMNS)
        group = SIMD_WIDTH * self.simdgroups
        grid = (tiles * group, blocks, self.of_state)
        variant = (self.dtype, STEPS, self.simdgroups, rows is not None, self.is_packed)
        args = (*given, found, end, n_end, self.sizes)
        p.launch(FILE, "mlstm_states", variant, args, grid, (group, 1, 1))
        return found, end, n_end

    def rows_grid(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """A simdgroup for each eight steps."""
        group = SIMD_WIDTH * self.simdgroups
        groups = -(-self.chunks * STEPS // (TILE * self.simdgroups))
        return (groups * group, self.each[0], 1), (group, 1, 1)

    def laid_out(self, width: int) -> Buffer:
        """[entries, heads, steps, width], in memory by steps first."""
        return self.p.new((self.entries, self.steps, self.heads, width), self.a.q.dtype)


def _is_declined(a: Arguments) -> bool:
    """States that are not whole."""
    return len({x is None for x in (a.c, a.n, a.m)}) == 2


@metal_kernel("mlstm_chunkwise")
def forward(p: Program, a: Arguments) -> Any:
    if _is_declined(a):
        return NotImplemented
    this = Problem(p, a)
    h = this.laid_out(this.values)
    if this.of_state == 0 or this.steps == 0:
        return h.transpose(1, 2), *_states_as_given(this)
    w, c, m, m_last = this.gates()
    states, c_last, n_last = this.states((w, c), this.k, this.v, (a.c, a.n))
    given = (this.q, this.k, this.v, w, c, m, this.m0, states, this.starts)
    variant = (this.dtype, STEPS, this.simdgroups, a.normalize, this.is_packed)
    if h.numel:
        args = (*given, h, this.sizes, a.eps)
        p.launch(FILE, "mlstm_output", variant, args, *this.rows_grid())
    return h.transpose(1, 2), c_last, n_last, m_last


def _states_as_given(this: Problem) -> list[Buffer]:
    """What is left where there are no steps."""
    p, a = this.p, this.a
    sizes = ((this.size, this.values), (this.size,), ())
    found = [p.new((this.sequences, this.heads, *size)) for size in sizes]
    for to, given in zip(found, (a.c, a.n, a.m), strict=True):
        _ = p.fill(to, 0.0) if given is None else p.copy(to, given)
    return found


@metal_kernel("mlstm_chunkwise_backward")
def backward(p: Program, a: Arguments) -> Any:
    if _is_declined(a):
        return NotImplemented
    this = Problem(p, a)
    dq, dk, dv = (this.laid_out(x) for x in (this.size, this.size, this.values))
    gate = a.i.dtype if a.i.dtype == a.f.dtype else torch.float32
    di, df = p.new(a.i.shape, gate), p.new(a.i.shape, gate)
    nothing = p.new((0,), a.dh.dtype)
    dstates = [nothing] * 3
    grads = tuple(x.transpose(1, 2) for x in (dq, dk, dv))
    if this.of_state and this.steps:
        found = _launch_backward(p, a, this, (dq, dk, dv), (di, df))
        dstates = list(found) if this.has_state else dstates
    elif this.has_state:
        dstates = [p.new(x.shape) for x in (a.c, a.n, a.m)]
        for to, given in zip(dstates, (a.dc_last, a.dn_last, a.dm_last), strict=True):
            _ = p.fill(to, 0.0) if given is None else p.copy(to, given)
    return *grads, p.rounded(di, a.i.dtype), p.rounded(df, a.f.dtype), *dstates


def _launch_backward(
    p: Program,
    a: Arguments,
    this: Problem,
    grads: tuple[Buffer, Buffer, Buffer],
    dgates: tuple[Buffer, Buffer],
) -> tuple[Buffer, Buffer, Buffer]:
    """The gradients of the initial states."""
    dh, simdgroups, starts, is_packed = p.dense(a.dh), this.simdgroups, this.starts, this.is_packed
    w, c, m, _ = this.gates()
    inputs = (this.q, this.k, this.v, dh)
    states, _, _ = this.states((w, c), this.k, this.v, (a.c, a.n))
    share, dl, of_m = (p.new(this.each) for _ in range(3))
    read = (*inputs, w, c, m, this.m0, states, starts)
    variant = (this.dtype, STEPS, simdgroups, a.normalize, not a.nx, a.sigmoid, is_packed)
    args = (*read, share, dl, of_m, this.sizes, a.eps)
    p.launch(BACKWARD, "mlstm_rows", variant, args, *this.rows_grid())
    of_states, dc, dn = this.states((w, c), this.q, dh, (a.dc_last, a.dn_last), (share, dl))
    of_q, of_k = p.new(this.each), p.new(this.each)
    results = ((grads[0], of_q, states), (grads[1], of_k, of_states), (grads[2], of_k, of_states))
    for number, (result, products, memory) in enumerate(results):
        rows = (share, dl, w, c, this.m0, memory, starts, result, products, this.sizes)
        kind = (this.dtype, number, STEPS, simdgroups, is_packed)
        if result.numel:
            p.launch(BACKWARD, "mlstm_gradient", kind, (*inputs, *rows), *this.rows_grid())
    number = this.each[0] * this.slots
    inner, threads = p.new((number,)), p.policy["threads"]
    sums = (states, of_states, starts, inner, this.sizes)
    p.launch(BACKWARD, "mlstm_inner", (STEPS, threads, is_packed), sums, number * threads, threads)
    di, df = dgates
    dm = p.new((this.sequences, this.heads))
    given = (p.dense(a.i, di.dtype), p.dense(a.f, df.dtype), c, this.m0, of_q, of_k, of_m, inner)
    last = (this.given(a.dm_last, ()), starts, di, df, dm, this.sizes)
    form = (MSL_TYPE[di.dtype], STEPS, not a.nx, a.sigmoid, is_packed)
    grid = this.of_state * SIMD_WIDTH
    p.launch(BACKWARD, "mlstm_gate_gradients", form, (*given, *last), grid, SIMD_WIDTH)
    return dc, dn, dm
