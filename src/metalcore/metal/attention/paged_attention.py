# SPDX-License-Identifier: MIT
"""Program of paged_attention."""

from typing import Any

from metalcore.metal.attention._over_cache import STORED, OverCache, integers
from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import Arguments, Buffer, Program

FILE = "attention/paged_attention.metal"


def _flat(p: Program, x: Buffer) -> Buffer:
    """Pages [pages, page, Hk, ...] as rows [1, Hk, rows, ...], without a copy where pages lie one
    after the other."""
    pages, page = x.shape[:2]
    if 1 not in (pages, page) and x.stride[0] != page * x.stride[1]:
        x = p.dense(x)
    step = x.stride[0] if page == 1 else x.stride[1]
    shape, stride = (1, x.shape[2], pages * page), (0, x.stride[2], step)
    return x.as_strided((*shape, *x.shape[3:]), (*stride, *x.stride[3:]), x.offset)


@metal_kernel("paged_attention")
def plan(p: Program, a: Arguments) -> Any:
    if a.k_cache.dtype not in STORED or a.k_cache.numel >= 2**31:
        return NotImplemented
    are_tokens, is_packed = a.cu_seqlens_k is not None, a.cu_seqlens_q is not None
    pages, page = a.k_cache.shape[:2]
    if are_tokens:
        entries, width = a.cu_seqlens_k.numel - 1, 0
        capacity = a.block_table.numel
    else:
        entries, width = a.block_table.shape
        capacity = width * page
    cache = [_flat(p, x) for x in (a.k_cache, a.v_cache)]
    scales = [None if x is None else _flat(p, x) for x in (a.k_scale, a.v_scale)]
    call = OverCache(p, a, cache, scales, entries, capacity, is_packed)
    call.paging = (page.bit_length() - 1, width, pages)
    lengths = integers(p, a.cu_seqlens_k if are_tokens else a.lengths)
    starts = integers(p, a.cu_seqlens_q)
    places = (integers(p, a.block_table), lengths, starts)
    merge = ((True, are_tokens, is_packed), lengths, starts)
    return call.run(FILE, "paged_attention", (are_tokens, is_packed), places, merge)
