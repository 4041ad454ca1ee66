# SPDX-License-Identifier: MIT
"""Programs of precise_sum."""

import torch

from metalcore.metal.plans import metal_kernel
from metalcore.metal.precise._slices import EXACT, LIMB_THREADS, SUM_ROWS, Slices
from metalcore.metal.program import MSL_TYPE, Arguments, Buffer, Program

FILE = "precise/sum.metal"


@metal_kernel("precise_sum")
def plan(p: Program, a: Arguments) -> Buffer:
    x = p.dense(a.x)
    n, rows = x.shape[-1], x.numel // max(1, x.shape[-1])
    y = p.new(x.shape[:-1], x.dtype)
    if x.numel == 0:
        return p.fill(y, float("nan") if a.mean else 0.0)
    T = MSL_TYPE[x.dtype]
    if a.level == EXACT:
        slices = Slices.of(n, LIMB_THREADS, p.policy)
        parts = p.new((rows, slices.groups, SUM_ROWS), torch.int32)
        grid = slices.grid(rows, LIMB_THREADS)
        p.launch(FILE, "sum_limbs", (T,), (x, parts, n, slices.size), *grid)
        args = (parts, y, n, slices.groups)
        p.launch(FILE, "sum_rounded", (T, a.mean), args, rows * 32, 32)
        return y
    threads = p.policy["threads"]
    slices = Slices.of(n, threads, p.policy)
    parts = p.new((rows, slices.groups, 2))
    grid = slices.grid(rows, threads)
    p.launch(FILE, "sum_pairs", (T,), (x, parts, n, slices.size), *grid)
    p.launch(FILE, "sum_of_pairs", (T, a.mean), (parts, y, n, slices.groups), rows, 64)
    return y
