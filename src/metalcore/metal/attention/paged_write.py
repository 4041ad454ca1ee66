# SPDX-License-Identifier: MIT
"""Program of paged_write."""

from typing import Any

import torch

from metalcore.metal.attention._over_cache import CODES, STORED
from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import (
    MAX_UINT,
    MSL_TYPE,
    SIMD_WIDTH,
    Arguments,
    Buffer,
    Program,
    round_up,
)

FILE = "attention/paged_write.metal"


@metal_kernel("paged_write")
def plan(p: Program, a: Arguments) -> Any:
    pages, page = a.k_cache.shape[:2]
    if a.k_cache.dtype not in STORED or pages * page >= 2**31:
        return NotImplemented
    slots = p.dense(a.slots, torch.int32)
    for x, cache, scale in ((a.k, a.k_cache, a.k_scale), (a.v, a.v_cache, a.v_scale)):
        if x.numel * SIMD_WIDTH > MAX_UINT:
            return NotImplemented
        if x.numel and cache.numel:
            _write(p, x, cache, scale, slots)
    return None


def _write(p: Program, x: Buffer, cache: Buffer, scale: Buffer | None, slots: Buffer) -> None:
    entries, heads, tokens, width = x.shape
    x = x if x.stride[-1] == 1 or width == 1 else p.dense(x)
    # rows with gaps are written by way of a copy
    to = cache if cache.stride[-1] == 1 or width == 1 else p.dense(cache)
    scales = p.new((1,)) if scale is None else scale.memory()
    steps = (0, 0, 0) if scale is None else scale.stride
    sizes = (heads, tokens, width, entries, cache.shape[1], cache.shape[0])
    strides = (*x.stride[:3], *to.stride[:3], *steps)
    simdgroups = p.policy["simdgroups"]
    group = SIMD_WIDTH * simdgroups
    variant = (
        *(MSL_TYPE[x.dtype], STORED[cache.dtype], cache.dtype in CODES),
        *(scale is not None, simdgroups),
    )
    args = (x.memory(), slots, to.memory(), scales, sizes, strides)
    threads = round_up(entries * tokens * heads * SIMD_WIDTH, group)
    p.launch(FILE, "paged_write", variant, args, threads, group)
    if to is not cache:
        p.copy(cache, to)
