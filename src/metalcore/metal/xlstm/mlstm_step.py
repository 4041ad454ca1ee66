# SPDX-License-Identifier: MIT
"""Programs of mlstm_step."""

from typing import Any

import torch

from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import MSL_TYPE, SIMD_WIDTH, Arguments, Program

FILE = "xlstm/mlstm_step.metal"


@metal_kernel("mlstm_step")
def step(p: Program, a: Arguments) -> Any:
    q, k, v = p.dense(a.q), p.dense(a.k), p.dense(a.v)
    entries, heads, size = q.shape
    columns = v.shape[2]
    dtype = a.i.dtype if a.i.dtype == a.f.dtype else torch.float32
    i, f = p.dense(a.i, dtype), p.dense(a.f, dtype)
    c, n, m = p.dense(a.c), p.dense(a.n), p.dense(a.m)
    h = p.new_like(v)
    c_next, n_next, m_next = p.new_like(c), p.new_like(n), p.new_like(m)
    if entries * heads == 0:
        return h, c_next, n_next, m_next
    simdgroups = p.policy["simdgroups"]
    args = (q, k, v, i, f, c, n, m, h, c_next, n_next, m_next, size, columns, a.eps)
    variant = (MSL_TYPE[q.dtype], MSL_TYPE[dtype], simdgroups, a.sigmoid, a.normalize)
    blocks = max(1, -(-columns // SIMD_WIDTH))
    grid = (blocks * SIMD_WIDTH, simdgroups, entries * heads)
    p.launch(FILE, "mlstm_step", variant, args, grid, (SIMD_WIDTH, simdgroups, 1))
    return h, c_next, n_next, m_next
