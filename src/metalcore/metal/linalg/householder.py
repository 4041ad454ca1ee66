# SPDX-License-Identifier: MIT
"""Programs of householder_vector and apply_householder."""

from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import MSL_TYPE, SIMD_WIDTH, Arguments, Buffer, Program, round_up

FILE = "linalg/householder.metal"


@metal_kernel("householder_vector")
def plan_vector(p: Program, a: Arguments) -> tuple[Buffer, Buffer]:
    x = p.dense(a.x)
    v, tau = p.new_like(x), p.new(x.shape[:-1], x.dtype)
    if x.numel:
        group = p.policy["threads"]
        args = (x, v, tau, tau.numel, x.shape[-1])
        threads = round_up(tau.numel * SIMD_WIDTH, group)
        p.launch(FILE, "householder_vector", (MSL_TYPE[x.dtype],), args, threads, group)
    return v, tau


@metal_kernel("apply_householder")
def plan_apply(p: Program, a: Arguments) -> Buffer:
    A, v, tau = p.dense(a.A), p.dense(a.v), p.dense(a.tau)
    Y, (m, n), group = p.new_like(A), A.shape[-2:], p.policy["threads"]
    variant = (MSL_TYPE[A.dtype],)
    if A.numel and a.left:
        group = min(group, round_up(n, SIMD_WIDTH))
        threads = (round_up(n, group), tau.numel, 1)
        p.launch(FILE, "apply_householder_left", variant, (A, v, tau, Y, m, n), threads, group)
    elif A.numel:
        rows = tau.numel * m
        args = (A, v, tau, Y, rows, m, n)
        threads = (round_up(rows * SIMD_WIDTH, group), 1, 1)
        p.launch(FILE, "apply_householder_right", variant, args, threads, group)
    return Y
