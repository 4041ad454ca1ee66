# SPDX-License-Identifier: MIT
"""Attention of the last few queries over keys in a cache, as in generation."""

import torch
from torch import Tensor

from metalcore._autocast import to_multiply
from metalcore._check import dtype_name, expect, expect_same_device, is_eager, refuse, shape
from metalcore._op import Example, Op, accumulate_dtype
from metalcore.ops.attention._arguments import as_heads, expect_numbers, expect_per_head
from metalcore.ops.attention.attention import attention_meaning

_decode = Op(
    "attention_decode(Tensor q, Tensor k, Tensor v, Tensor? lengths, Tensor? alibi_slopes,"
    " Tensor? sinks, float scale, float? softcap, int? left) -> (Tensor out, Tensor lse)"
)


def attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lengths: Tensor | None = None,
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
        k, v: the cache, [B, Hk, T, D] and [B, Hk, T, Dv], with any strides.
        lengths: int32 or int64 [B]: how many keys each entry has, the queries' own included; all
            where it is None. On a GPU they are not checked.
        window: a query sees so many keys back, its own included.
        softcap, alibi_slopes, sinks, scale: as for `attention`.

    Returns:
        [B, H, Tq, Dv] in the dtype of q.

    Example:
        >>> y = metalcore.attention_decode(q, cache_k, cache_v, lengths=lengths)
    """
    op = "attention_decode"
    q, k, v = to_multiply(q, k, v)
    if q.dim() != 4:
        refuse(op, f"q, k and v must all be [B, H, T, D]; got q {shape(q)}")
    q, k, v = as_heads(op, q, k, v, are_packed=False)
    if lengths is not None:
        _expect_lengths(op, lengths, q, k)
    if window is not None:
        expect(window > 0, op, f"window must be at least 1, the key itself, got {window}")
    scale = float(q.shape[-1] ** -0.5 if q.shape[-1] else 1) if scale is None else float(scale)
    expect_numbers(op, scale, softcap)
    expect_per_head(op, "alibi_slopes", alibi_slopes, q, per_entry=True)
    expect_per_head(op, "sinks", sinks, q)
    cap, left = None if softcap is None else float(softcap), None if window is None else window - 1
    out: Tensor = _decode(q, k, v, lengths, alibi_slopes, sinks, scale, cap, left)[0]
    return out


def _expect_lengths(op: str, lengths: Tensor, q: Tensor, k: Tensor) -> None:
    expect_same_device(op, q=q, lengths=lengths)
    if lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: lengths must be int32 or int64, got {dtype_name(lengths.dtype)}")
    if lengths.shape != q.shape[:1]:
        refuse(op, f"lengths must have the shape [{q.shape[0]}], got {shape(lengths)}")
    # on a GPU, a look would wait for it
    if lengths.is_cpu and is_eager() and type(lengths) is Tensor:
        values, most = lengths.tolist(), k.shape[2]
        if any(not 0 <= n <= most for n in values):
            refuse(op, f"lengths must be from 0 to the {most} keys of the cache, got {values}")


@_decode.reference
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
        bias = bias - slopes.to(bias.dtype).reshape(-1, q.shape[1], 1, 1) * distance.abs()
    bias = bias.masked_fill(~visible, -torch.inf)
    found: tuple[Tensor, Tensor] = attention_meaning(
        q, k, v, bias, None, sinks, None, None, scale, softcap, None, None
    )
    return found


@_decode.example
def _(dtype: torch.dtype) -> Example:
    q = torch.randn(2, 4, 1, 16).to(dtype)
    k, v = torch.randn(2, 2, 70, 16).to(dtype), torch.randn(2, 2, 70, 9).to(dtype)
    lengths = torch.tensor([70, 33])
    return Example((q, k, v, lengths, None, torch.randn(4), 0.25, None, None), reduces_over=70)
