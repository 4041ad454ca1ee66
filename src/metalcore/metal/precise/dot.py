# SPDX-License-Identifier: MIT
"""Programs of precise_dot."""

import torch

from metalcore.metal.plans import metal_kernel
from metalcore.metal.precise._slices import DOT_ROWS, EXACT, LIMB_THREADS, Slices
from metalcore.metal.program import MSL_TYPE, Arguments, Buffer, Program

FILE = "precise/dot.metal"


@metal_kernel("precise_dot")
def plan(p: Program, a: Arguments) -> Buffer:
    x, y = p.dense(a.x), p.dense(a.y)
    n, rows = x.shape[-1], x.numel // max(1, x.shape[-1])
    z = p.new(x.shape[:-1], x.dtype)
    if x.numel == 0:
        return p.fill(z, 0.0)
    T = MSL_TYPE[x.dtype]
    if a.level == EXACT:
        slices = Slices.of(n, LIMB_THREADS, p.policy)
        parts = p.new((rows, slices.groups, DOT_ROWS), torch.int32)
        grid = slices.grid(rows, LIMB_THREADS)
        p.launch(FILE, "dot_limbs", (T,), (x, y, parts, n, slices.size), *grid)
        p.launch(FILE, "dot_rounded", (T, a.root), (parts, z, slices.groups), rows * 64, 64)
        return z
    threads = p.policy["threads"]
    slices = Slices.of(n, threads, p.policy)
    parts = p.new((rows, slices.groups, 2))
    grid = slices.grid(rows, threads)
    p.launch(FILE, "dot_pairs", (T,), (x, y, parts, n, slices.size), *grid)
    p.launch(FILE, "dot_of_pairs", (T, a.root), (parts, z, slices.groups), rows, 64)
    return z
