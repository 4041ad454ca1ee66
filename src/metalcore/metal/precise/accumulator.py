# SPDX-License-Identifier: MIT
"""Programs of precise_limbs."""

import torch

from metalcore.metal.plans import metal_kernel
from metalcore.metal.precise import sum as sums
from metalcore.metal.precise._slices import LIMB_THREADS, SUM_ROWS, Slices
from metalcore.metal.program import MSL_TYPE, Arguments, Buffer, Program

FILE = "precise/accumulator.metal"
WIDTH = 139
"""Limbs, flags, and the number of terms."""


@metal_kernel("precise_limbs")
def plan(p: Program, a: Arguments) -> Buffer:
    x = p.dense(a.x)
    n, rows = x.shape[-1], x.numel // max(1, x.shape[-1])
    limbs = p.new((*x.shape[:-1], WIDTH), torch.int64)
    if x.numel == 0:
        return p.fill(limbs, 0.0)
    slices = Slices.of(n, LIMB_THREADS, p.policy)
    parts = p.new((rows, slices.groups, SUM_ROWS), torch.int32)
    args = (x, parts, n, slices.size)
    grid = slices.grid(rows, LIMB_THREADS)
    p.launch(sums.FILE, "sum_limbs", (MSL_TYPE[x.dtype],), args, *grid)
    threads = ((WIDTH, rows, 1), (WIDTH, 1, 1))
    p.launch(FILE, "limbs_merged", (), (parts, limbs, n, slices.groups), *threads)
    return limbs
