# SPDX-License-Identifier: MIT
"""Attention of the last few queries over keys in a cache, as in generation."""

import torch
from torch import Tensor

from metalcore._autocast import to_multiply
from metalcore._check import expect_float, expect_same_device, refuse, shape
from metalcore._op import Example, Op, accumulate_dtype
from metalcore.ops.attention._arguments import (
    as_heads_of_any,
    as_left,
    as_scale,
    expect_lengths,
    expect_numbers,
    expect_per_head,
)
from metalcore.ops.attention._eight_bit import (
    CODES,
    as_codes,
    as_scales,
    decoded,
    encoded,
    expect_storage,
)
from metalcore.ops.attention.attention import attention_meaning

_decode = Op(
    "attention_decode(Tensor q, Tensor k, Tensor v, Tensor? k_scale, Tensor? v_scale,"
    " Tensor? lengths, Tensor? alibi_slopes, Tensor? sinks, float scale, float? softcap,"
    " int? left) -> (Tensor out, Tensor lse)",
    sharding="bhQD, bhTD, bhTE, bhT, bhT, b, bh, h -> bhQE, bhQ",
)


def attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lengths: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The last few queries of each sequence over the keys and values that a cache holds.

    Equal to `attention(..., causal=True)` over the first `lengths` keys: the last query stands at
    the last of them. Keys and values are read once for all heads that share them, and what the
    cache holds after them is not read. It has no gradient.

    Args:
        q: [B, H, Tq, D], float32, float64, float16 or bfloat16; fast for few queries.
        k, v: the cache, [B, Hk, T, D] and [B, Hk, T, Dv], with any strides: of the dtype of q, or
            8-bit as `paged_write` makes them: int8, float8_e4m3fn, or its codes as uint8.
        lengths: int32 or int64 [B]: how many keys each entry has, the queries' own included; all
            where it is None. On a GPU they are not checked.
        k_scale, v_scale: of 8-bit keys and values, what broadcasts to [B, Hk, T]: the number that
            the codes of a token and head are times. float8 may be without.
        window: a query sees so many keys back, its own included.
        softcap, alibi_slopes, sinks, scale: as for `attention`.

    Returns:
        [B, H, Tq, Dv] in the dtype of q.

    Example:
        >>> y = metalcore.attention_decode(q, cache_k, cache_v, lengths=lengths)
    """
    op = "attention_decode"
    k, v = as_codes(k), as_codes(v)
    if k.dtype in CODES:
        (q,) = to_multiply(q)
    else:
        q, k, v = to_multiply(q, k, v)
    expect_float(op, q=q)
    expect_storage(op, q, k=k, v=v)
    if q.dim() != 4:
        refuse(op, f"q, k and v must all be [B, H, T, D]; got q {shape(q)}")
    q, k, v = as_heads_of_any(op, q, k, v, are_packed=False)
    scales = as_scales(op, k_scale=(k_scale, k), v_scale=(v_scale, v))
    if lengths is not None:
        expect_lengths(op, lengths, q.shape[0], k.shape[2])
        expect_same_device(op, q=q, lengths=lengths)
    scale = as_scale(scale, q)
    expect_numbers(op, scale, softcap)
    expect_per_head(op, "alibi_slopes", alibi_slopes, q, per_entry=True)
    expect_per_head(op, "sinks", sinks, q)
    cap, left = None if softcap is None else float(softcap), as_left(op, window)
    out: Tensor = _decode(q, k, v, *scales, lengths, alibi_slopes, sinks, scale, cap, left)[0]
    return out


@_decode.reference
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    lengths: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    left: int | None,
) -> tuple[Tensor, Tensor]:
    keys, queries = k.shape[2], q.shape[2]
    known = torch.full((q.shape[0],), keys, device=q.device) if lengths is None else lengths
    ends = known.view(-1, 1, 1, 1)
    key = torch.arange(keys, device=q.device)
    position = torch.arange(queries, device=q.device)[:, None] + ends - queries
    distance = position - key
    visible = (distance >= 0) & (key < ends)
    if left is not None:
        visible = visible & (distance <= left)
    bias = torch.zeros_like(distance, dtype=accumulate_dtype(q))
    if slopes is not None:
        bias = bias - slopes.to(bias.dtype)[..., None, None] * distance.abs()
    bias = bias.masked_fill(~visible, -torch.inf)
    k, v = decoded(k, k_scale, bias.dtype), decoded(v, v_scale, bias.dtype)
    found: tuple[Tensor, Tensor] = attention_meaning(
        q, k, v, bias, None, sinks, None, None, scale, softcap, None, None
    )
    return found


def _cached(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(2, 4, 1, 16).to(dtype)
    return q, torch.randn(2, 2, 70, 16).to(dtype), torch.randn(2, 2, 70, 9).to(dtype)


@_decode.example
def _(dtype: torch.dtype) -> Example:
    lengths = torch.tensor([70, 33])
    args = (*_cached(dtype), None, None, lengths, None, torch.randn(4), 0.25, None, None)
    return Example(args, reduces_over=70)


@_decode.example
def _(dtype: torch.dtype) -> Example:
    """So many keys that a GPU takes them in parts."""
    q, k, v = (torch.randn(1, 1, n, 16, dtype=dtype) for n in (1, 600, 600))
    args = (q, k, v, None, None, None, None, None, 0.25, None, None)
    return Example(args, reduces_over=600)


@_decode.example
def _(dtype: torch.dtype) -> Example:
    q, *stored = _cached(dtype)
    (k, k_scale), (v, v_scale) = (encoded(x, torch.int8, has_scale=True) for x in stored)
    args = (q, k, v, k_scale, v_scale, None, torch.rand(4), None, 0.25, 5.0, 40)
    return Example(args, reduces_over=70)
