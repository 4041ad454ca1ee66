# SPDX-License-Identifier: MIT
"""Programs of double_float_matmul."""

from math import prod
from typing import Any

from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import Arguments, Program, round_up

FILE = "precise/double_float_matmul.metal"
TILE = 16
"""Rows and columns of a threadgroup, as in the kernel."""


@metal_kernel("double_float_matmul")
def plan(p: Program, a: Arguments) -> Any:
    *batch, M, K = a.A.shape
    N = a.B.shape[-1]
    high, low = p.new((*batch, M, N)), p.new((*batch, M, N))
    rest = [a.C, a.C_low, a.D, a.D_low]
    has_rest = None not in rest
    if not has_rest and rest != [None] * 4:
        return NotImplemented
    if K == 0 and not has_rest:
        return p.fill(high, 0.0), p.fill(low, 0.0)
    if high.numel:
        given = [a.A, a.A_low, a.B, a.B_low]
        given += rest if has_rest else [a.A, a.A_low] * 2
        args = (*map(p.dense, given), high, low, M, K, N)
        threads = (round_up(N, TILE), round_up(M, TILE), prod(batch))
        p.launch(FILE, "double_float_matmul", (has_rest,), args, threads, (TILE, TILE, 1))
    return high, low
