# SPDX-License-Identifier: MIT
"""Programs of causal_conv1d and causal_conv1d_backward."""

from typing import Any

import torch

from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import MSL_TYPE, SIMD_WIDTH, Arguments, Buffer, Program, round_up

FILE = "xlstm/causal_conv1d.metal"
_THREADS = 256


def _taps(p: Program, a: Arguments) -> tuple[Buffer, Buffer]:
    """Weight and bias in one dtype; the weight itself where there is no bias."""
    if a.bias is None:
        weight = p.dense(a.weight)
        return weight, weight
    dtype = a.weight.dtype if a.weight.dtype == a.bias.dtype else torch.float32
    return p.dense(a.weight, dtype), p.dense(a.bias, dtype)


def _grid(x: Buffer, run: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """A thread per channel and run of steps."""
    entries, steps, channels = x.shape
    group = min(_THREADS, round_up(channels, SIMD_WIDTH))
    return (channels, max(1, -(-steps // run)), entries), (group, 1, 1)


def _variant(a: Arguments, x: Buffer, weight: Buffer) -> tuple[Any, ...]:
    flags = (a.silu, a.bias is not None, a.state is not None)
    return MSL_TYPE[x.dtype], MSL_TYPE[weight.dtype], weight.shape[1], *flags


@metal_kernel("causal_conv1d")
def forward(p: Program, a: Arguments) -> tuple[Buffer, Buffer]:
    x = p.dense(a.x)
    entries, steps, channels = x.shape
    y = p.new_like(x)
    last = p.new((entries, a.weight.shape[1] - 1, channels), x.dtype)
    if last.numel == 0:
        return y, last
    weight, bias = _taps(p, a)
    state = x if a.state is None else p.dense(a.state)
    run = p.policy["steps"]
    args = (x, weight, bias, state, y, last, steps, channels, run)
    p.launch(FILE, "causal_conv1d", _variant(a, x, weight), args, *_grid(x, run))
    return y, last


@metal_kernel("causal_conv1d_backward")
def backward(p: Program, a: Arguments) -> tuple[Buffer, Buffer, Buffer, Buffer]:
    x, dy = p.dense(a.x), p.dense(a.dy)
    _, steps, channels = x.shape
    weight, bias = _taps(p, a)
    taps = weight.shape[1]
    nothing = p.new((0,), x.dtype)
    dx, dweight = p.new_like(x), p.new_like(weight)
    dbias = nothing if a.bias is None else p.new_like(bias)
    dstate = nothing if a.state is None else p.new_like(a.state)
    run = p.policy["steps"]
    grid, group = _grid(x, run)
    if min(grid) == 0:
        p.fill(dweight, 0.0)
        p.fill(dbias, 0.0)
    else:
        runs = grid[1] * grid[2]
        share = p.new((runs, taps + 1, channels))
        state = x if a.state is None else p.dense(a.state)
        dlast = x if a.dlast is None else p.dense(a.dlast)
        written = dx if a.state is None else dstate
        args = (dy, dlast, x, weight, bias, state, dx, written, share, steps, channels, run)
        variant = (*_variant(a, x, weight), a.dlast is not None)
        p.launch(FILE, "causal_conv1d_backward", variant, args, grid, group)
        has_bias = a.bias is not None
        sums = (share, dweight, dbias if has_bias else dweight, runs, channels)
        kind = (MSL_TYPE[weight.dtype], taps, has_bias)
        p.launch(FILE, "causal_conv1d_weights", kind, sums, (channels, taps + 1, 1), group)
    dweight = p.rounded(dweight, a.weight.dtype)
    dbias = nothing if a.bias is None else p.rounded(dbias, a.bias.dtype)
    return dx, dweight, dbias, dstate
