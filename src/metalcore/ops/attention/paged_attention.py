# SPDX-License-Identifier: MIT
"""Attention over keys and values in pages of one cache, which many sequences share."""

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from metalcore._check import (
    expect_float,
    expect_same_device,
    expect_tensors,
    refuse,
    shape,
)
from metalcore._op import Example, Op, accumulate_dtype
from metalcore.ops.attention._arguments import (
    as_left,
    as_scale,
    can_be_read,
    expect_integers,
    expect_lengths,
    expect_numbers,
    expect_per_head,
    expect_start_of_each,
)
from metalcore.ops.attention._eight_bit import (
    as_codes,
    as_scales,
    decoded,
    encoded,
    expect_storage,
)
from metalcore.ops.attention.attention import attention_meaning


def _letters(*args: Any) -> str:
    b = "b" if args[7] is None else "B"
    cache = "PShD, PShE, PSh, PSh"
    return f"{b}hQD, {cache}, {b}N, {b}, C, C, {b}h, h -> {b}hQE, {b}hQ"


_paged = Op(
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? k_scale, Tensor? v_scale,"
    " Tensor block_table, Tensor? lengths, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k,"
    " Tensor? alibi_slopes, Tensor? sinks, float scale, float? softcap, int? left)"
    " -> (Tensor out, Tensor lse)",
    sharding=_letters,
)


@overload
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The last queries of each sequence over its keys and values, which lie in pages of a cache.

    Key t of sequence b is row t % page of page block_table[b, t // page]. The last query stands at
    the last key and sees no keys after its own position. Pages are read where they are, once for
    all heads that share them, for one query or many. It has no gradient.

    Args:
        q: [B, H, Tq, D]; or [Tq, H, D] with `cu_seqlens_q`, sequences one after the other.
        k_cache, v_cache: [pages, page, Hk, D] and [pages, page, Hk, Dv], page a power of two: of
            the dtype of q, or 8-bit as `paged_write` makes them (int8, float8_e4m3fn, uint8).
        block_table: int32 or int64 [B, n]: the pages of each sequence. -1 stands for none: nothing
            is read, and no query sees its keys.
        lengths: int32 or int64 [B]: how many keys each sequence has, its queries' own included.
        cu_seqlens_q: where the queries of each sequence start, and the end, [B + 1].
        cu_seqlens_k: with it the cache is [rows, Hk, D] and `block_table` [Tk] is the row of each
            key, sequences one after the other, which start there; there are no `lengths`.
        k_scale, v_scale: of an 8-bit cache, what broadcasts to [pages, page, Hk]: the number that
            the codes of a token and head are times. float8 may be without.
        window: a query sees so many keys back, its own included.
        softcap, scale: as for `attention`.
        alibi_slopes, sinks: [H] or [B, H], and [H], as for `attention`.
        return_lse: also return the logarithm of the softmax's denominator.

    Tables, lengths and starts are checked on the CPU, not on a GPU.

    Returns:
        [B, H, Tq, Dv] in the dtype of q, in memory as [B, Tq, H, Dv]; with `cu_seqlens_q`
        [Tq, H, Dv]. With `return_lse` also float32 (float64) [B, H, Tq], or [H, Tq].

    Example:
        >>> y = metalcore.paged_attention(q, k_cache, v_cache, block_table, lengths)
    """
    op = "paged_attention"
    expect_float(op, q=q)
    expect_tensors(op, k_cache=k_cache, v_cache=v_cache)
    k, v = _as_pages(op, k_cache, v_cache, cu_seqlens_k is not None)
    expect_storage(op, q, k_cache=k, v_cache=v)
    scales = _as_page_scales(op, k, v, k_scale, v_scale, cu_seqlens_k is not None)
    entries = _expect_places(op, k, block_table, lengths, cu_seqlens_k)
    are_packed = cu_seqlens_q is not None
    if q.dim() != (3 if are_packed else 4):
        form = "[Tq, H, D] with cu_seqlens_q" if are_packed else "[B, H, Tq, D]"
        refuse(op, f"q must be {form}, got {shape(q)}")
    if cu_seqlens_q is not None:
        expect_start_of_each(op, "cu_seqlens_q", cu_seqlens_q, q.shape[0])
        q = q.transpose(0, 1)[None]
    known = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.numel() - 1
    if known != entries:
        refuse(op, f"q and its keys must be of as many sequences, got {known} and {entries}")
    _expect_heads(op, q, k)
    others = {"lengths": lengths, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    expect_same_device(op, q=q, k_cache=k, v_cache=v, block_table=block_table, **others)
    scale = as_scale(scale, q)
    expect_numbers(op, scale, softcap)
    expect_per_head(op, "alibi_slopes", alibi_slopes, q, per_entry=True, entries=entries)
    expect_per_head(op, "sinks", sinks, q)
    cap, left = None if softcap is None else float(softcap), as_left(op, window)
    places = (block_table, lengths, cu_seqlens_q, cu_seqlens_k)
    out, lse = _paged(q, k, v, *scales, *places, alibi_slopes, sinks, scale, cap, left)
    if are_packed:
        out, lse = out[0].transpose(0, 1), lse[0]
    return (out, lse) if return_lse else out


def _as_pages(op: str, k: Tensor, v: Tensor, are_rows: bool) -> tuple[Tensor, Tensor]:
    """[pages, page, Hk, D]: rows of their own are pages of one."""
    k, v = as_codes(k), as_codes(v)
    rank, form = (3, "[rows, Hk, D]") if are_rows else (4, "[pages, page, Hk, D]")
    if k.dim() != rank or v.dim() != rank or k.shape[:-1] != v.shape[:-1]:
        refuse(op, f"both caches must be {form}; got {shape(k)} and {shape(v)}")
    if are_rows:
        return k[:, None], v[:, None]
    page = k.shape[1]
    if page < 1 or page & (page - 1):
        refuse(op, f"a page must have a power of two of rows, got {page}")
    return k, v


def _as_page_scales(
    op: str,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    are_rows: bool,
) -> list[Tensor | None]:
    if are_rows:
        k_scale, v_scale = (
            x if x is None or x.dim() != 2 else x[:, None] for x in (k_scale, v_scale)
        )
    return as_scales(op, k_scale=(k_scale, k), v_scale=(v_scale, v))


def _expect_places(
    op: str, k: Tensor, table: Tensor, lengths: Tensor | None, starts: Tensor | None
) -> int:
    """How many sequences there are."""
    expect_integers(op, block_table=table)
    if starts is not None:
        if lengths is not None:
            refuse(op, "lengths follow from cu_seqlens_k: give one of them")
        if table.dim() != 1:
            refuse(op, f"block_table must be [Tk] with cu_seqlens_k, got {shape(table)}")
        expect_start_of_each(op, "cu_seqlens_k", starts, table.shape[0])
        entries = starts.numel() - 1
    else:
        if lengths is None:
            refuse(op, "lengths must be given, or cu_seqlens_k")
        if table.dim() != 2:
            refuse(op, f"block_table must be [B, n], got {shape(table)}")
        entries = table.shape[0]
        expect_lengths(op, lengths, entries, table.shape[1] * k.shape[1])
    if can_be_read(table) and table.numel():
        least, most = (int(n) for n in table.aminmax())
        if least < -1 or most >= k.shape[0]:
            found = f"got {least} to {most}"
            refuse(op, f"block_table must hold -1 or one of the {k.shape[0]} pages; {found}")
    return entries


def _expect_heads(op: str, q: Tensor, k: Tensor) -> None:
    if q.shape[3] != k.shape[3]:
        refuse(op, f"q and k_cache must have the same D; got q {shape(q)}, k_cache {shape(k)}")
    heads, key_heads = q.shape[1], k.shape[2]
    if heads != key_heads and (key_heads == 0 or heads % key_heads):
        refuse(op, f"the {heads} heads of q must be a multiple of the {key_heads} of the cache")


class _Rows(NamedTuple):
    """Of each row of queries or of keys: its sequence, and its place counted from the end."""

    sequence: Tensor
    place: Tensor


def _rows_of(starts: Tensor, rows: int) -> _Rows:
    row = torch.arange(rows, device=starts.device)
    ends = starts[1:].to(row.dtype)
    sequence = torch.bucketize(row, ends, right=True)
    return _Rows(sequence, row - ends[sequence] if len(ends) else row)


def _rows_of_each(entries: int, count: int, ends: Tensor) -> _Rows:
    """As many for each entry, of which the first `ends` are there."""
    row = torch.arange(count, device=ends.device).repeat(entries)
    sequence = torch.arange(entries, device=ends.device).repeat_interleave(count)
    return _Rows(sequence, row - ends.to(row.dtype)[sequence])


@_paged.reference
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    table: Tensor,
    lengths: Tensor | None,
    starts_q: Tensor | None,
    starts_k: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    left: int | None,
) -> tuple[Tensor, Tensor]:
    B, H, Tq, D = q.shape
    kind = accumulate_dtype(q)
    if starts_k is not None:
        keys = _rows_of(starts_k, table.shape[0])
    else:
        ends = table.new_zeros(B) if lengths is None else lengths
        keys = _rows_of_each(table.shape[0], table.shape[1] * k.shape[1], ends)
    if starts_q is not None:
        queries = _rows_of(starts_q, Tq)
    else:
        queries = _rows_of_each(B, Tq, torch.full((B,), Tq, device=q.device))
    distance = queries.place[:, None] - keys.place
    there = (table.reshape(-1) >= 0).repeat_interleave(k.shape[1])
    visible = (queries.sequence[:, None] == keys.sequence) & (keys.place < 0) & there
    visible = visible & (distance >= 0)
    if left is not None:
        visible = visible & (distance <= left)
    bias = torch.zeros((1, H, *distance.shape), dtype=kind, device=q.device)
    if slopes is not None:
        each = slopes.to(kind).expand(-1, H) if slopes.dim() == 2 else slopes.to(kind)[None]
        of_row = each[queries.sequence if slopes.dim() == 2 else queries.sequence * 0]
        bias = bias - of_row.T[None, :, :, None] * distance.abs()
    bias = bias.masked_fill(~visible, -torch.inf)
    pages = table.reshape(-1).clamp(min=0)
    # [1, Hk, keys, D]
    k, v = (
        decoded(x[pages], None if s is None else s[pages], kind).flatten(0, 1).transpose(0, 1)[None]
        for x, s in ((k, k_scale), (v, v_scale))
    )
    rows = q.transpose(1, 2).reshape(1, B * Tq, H, D).transpose(1, 2)
    out, lse = attention_meaning(
        rows, k, v, bias, None, sinks, None, None, scale, softcap, None, None
    )
    out = out.transpose(1, 2).reshape(B, Tq, H, v.shape[3]).transpose(1, 2)
    return out, lse.reshape(H, B, Tq).transpose(0, 1).contiguous()


def _pages(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(9, 16, 2, 16).to(dtype), torch.randn(9, 16, 2, 9).to(dtype)


@_paged.example
def _(dtype: torch.dtype) -> Example:
    q, (k, v) = torch.randn(2, 4, 1, 16).to(dtype), _pages(dtype)
    table = torch.tensor([[3, 0, 7, 5], [8, 1, -1, -1]])
    places = (table, torch.tensor([50, 17]), None, None)
    args = (q, k, v, None, None, *places, None, torch.randn(4), 0.25, None, None)
    return Example(args, reduces_over=64)


@_paged.example
def _(dtype: torch.dtype) -> Example:
    q = torch.randn(1, 4, 14, 16).to(dtype)
    (k, k_scale), (v, v_scale) = (
        encoded(x.flatten(0, 1)[:, None], torch.int8, has_scale=True) for x in _pages(dtype)
    )
    starts = (torch.tensor([0, 2, 14]), torch.tensor([0, 20, 50]))
    places = (torch.arange(110, 60, -1), None, *starts)
    args = (q, k, v, k_scale, v_scale, *places, torch.rand(4), None, 0.25, 5.0, 40)
    return Example(args, reduces_over=64)
