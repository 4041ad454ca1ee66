# SPDX-License-Identifier: MIT
"""Programs of double_float_trsm."""

from math import prod

from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import SIMD_WIDTH, Arguments, Buffer, Program, round_up

FILE = "precise/double_float_trsm.metal"


@metal_kernel("double_float_trsm")
def plan(p: Program, a: Arguments) -> tuple[Buffer, Buffer]:
    *batch, N, K = a.B.shape
    high, low = p.new(a.B.shape), p.new(a.B.shape)
    if high.numel:
        given = [p.dense(b) for b in (a.A, a.A_low, a.B, a.B_low)]
        group = min(p.policy["threads"], round_up(K, SIMD_WIDTH))
        threads = (round_up(K, group), prod(batch), 1)
        p.launch(FILE, "double_float_trsm", (a.lower,), (*given, high, low, N, K), threads, group)
    return high, low
