# SPDX-License-Identifier: MIT
"""The program of rope."""

from typing import Any

import torch

from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import MAX_UINT, MSL_TYPE, Arguments, Buffer, Program, round_up

FILE = "train/rope.metal"


@metal_kernel("rope")
def plan(p: Program, a: Arguments) -> Any:
    heads_dim, q = a.heads_dim, a.q
    q_out = _new_laid_out_as(p, q, heads_dim)
    k_out = p.new((0,), q.dtype) if a.k is None else _new_laid_out_as(p, a.k, heads_dim)
    if q_out.numel + k_out.numel == 0:
        return q_out, k_out
    # where there is no k, the kernel neither reads nor writes one
    ends = (q_out, p.new((4, 1, 1, 1), q.dtype) if a.k is None else k_out)
    starts = [x if x.stride[-1] == 1 else p.dense(x) for x in (q, q if a.k is None else a.k)]
    cos, sin = (
        p.dense(t, q.dtype if t.dtype == q.dtype else torch.float32) for t in (a.cos, a.sin)
    )

    dims = (0, heads_dim, 3 - heads_dim)
    strides = [[x.stride[d] for d in dims] for x in (*starts, *ends)]
    if any(n > MAX_UINT for s in strides for n in s):
        return NotImplemented
    sizes = (q.shape[-1], a.rotary_dim // 2, cos.shape[-1])
    is_wide = all(x.is_aligned for x in (*starts, cos, sin))
    is_wide = is_wide and all(n % 4 == 0 for n in (*sizes, *strides[0], *strides[1]))
    width = 4 if is_wide else 1
    size, half, row = (n // width for n in sizes)
    in_chunks = (tuple(n // width for n in s) for s in strides)

    batches, length = q.shape[0], q.shape[3 - heads_dim]
    q_heads = q.shape[heads_dim]
    k_heads = 0 if a.k is None else a.k.shape[heads_dim]
    entries = a.cos if a.positions is None else a.positions
    per_batch = len(entries.shape) == (3 if a.positions is None else 2) and entries.shape[0] > 1
    positions = p.new((1,), torch.int64) if a.positions is None else p.dense(a.positions)
    run = p.policy["heads_per_thread"]
    q_runs, k_runs = -(-q_heads // run), -(-k_heads // run)
    units = size if a.interleaved else size - half
    across = min(round_up(units, 4), p.policy["threads"])
    group = (across, min(length, p.policy["threads"] // across), 1)
    threads = (round_up(units, across), round_up(length, group[1]), batches * (q_runs + k_runs))
    flags = (a.interleaved, sizes[2] < a.rotary_dim, a.positions is not None, a.inverse)
    args = (
        *(*(_memory(p, x) for x in starts), cos, sin, positions, *(_memory(p, x) for x in ends)),
        *(length, q_heads, k_heads, run, q_runs, q_runs + k_runs, size, half),
        *(length if per_batch else 0, cos.numel // sizes[2], row, *in_chunks),
    )
    variant = (MSL_TYPE[q.dtype], MSL_TYPE[cos.dtype], width, *flags)
    p.launch(FILE, "rope", variant, args, threads, group)
    return q_out, k_out


def _new_laid_out_as(p: Program, x: Buffer, heads_dim: int) -> Buffer:
    """A result without gaps, with the heads of a position together if `x` has them so."""
    is_together = x.stride[heads_dim] < x.stride[3 - heads_dim]
    if is_together == (heads_dim == 2):
        return p.new_like(x)
    batches, a, b, size = x.shape
    return p.new((batches, b, a, size), x.dtype).transpose(1, 2)


def _memory(p: Program, x: Buffer) -> Buffer:
    """All that `x` spans, as a kernel takes it."""
    return x.memory() if x.numel else p.new((4,), x.dtype)
