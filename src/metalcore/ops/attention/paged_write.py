# SPDX-License-Identifier: MIT
"""New keys and values into the pages of a cache, in 8 bits where that is what it holds."""

import torch
from torch import Tensor

from metalcore._check import (
    expect_float,
    expect_same_device,
    expect_same_dtype,
    expect_tensors,
    refuse,
    shape,
)
from metalcore._op import Example, Op
from metalcore.ops.attention._arguments import can_be_read, expect_integers
from metalcore.ops.attention._eight_bit import CODES, as_codes, encoded, expect_storage

_write = Op(
    "paged_write(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache,"
    " Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor slots) -> ()",
    sharding="BhTD, BhTE, PShD, PShE, PSh, PSh, BT -> ",
)


def paged_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write keys and values of new tokens into a cache: token i into row slots[i].

    Slot s is row s % page of page s // page. A cache of 8 bits gets the nearest codes. With a
    scale, the largest number of a token and head becomes the largest code, 127 or 448, and the
    scale is written too; float8 without one keeps numbers up to 448.

    Args:
        k, v: [T, Hk, D] and [T, Hk, Dv], or [B, Hk, T, D] and [B, Hk, T, Dv], as projections give
            them, with any strides; float32, float64, float16 or bfloat16.
        k_cache, v_cache: [pages, page, Hk, D] and [pages, page, Hk, Dv], or [rows, Hk, D]; of the
            dtype of k, or int8, float8_e4m3fn, or uint8 for its codes. Written in place.
        slots: int32 or int64 [T], or [B, T]: the row of each token, each at most once. -1 writes
            nothing. On a GPU they are not checked.
        k_scale, v_scale: float32 [pages, page, Hk], or [rows, Hk], for a cache of 8 bits; int8
            must have them. Written in place.

    Returns:
        Nothing.

    Example:
        >>> metalcore.paged_write(k, v, k_cache, v_cache, slots)
    """
    op = "paged_write"
    expect_float(op, k=k, v=v)
    expect_same_dtype(op, k=k, v=v)
    expect_tensors(op, k_cache=k_cache, v_cache=v_cache)
    expect_integers(op, slots=slots)
    caches = [as_codes(k_cache), as_codes(v_cache)]
    expect_storage(op, k, k_cache=caches[0], v_cache=caches[1])
    if not (k.dim() == v.dim() and k.dim() in (3, 4)):
        form = "[T, Hk, D] or [B, Hk, T, D]"
        refuse(op, f"k and v must both be {form}; got {shape(k)} and {shape(v)}")
    if k.dim() == 3:
        k, v = (x.transpose(0, 1)[None] for x in (k, v))
        slots = slots[None]
    if k.shape[:3] != v.shape[:3] or slots.shape != (k.shape[0], k.shape[2]):
        found = f"got k {shape(k)}, v {shape(v)} and slots {shape(slots)}"
        refuse(op, f"k and v must have the same tokens and heads, and each token a slot; {found}")
    if caches[0].dim() == 3 and caches[1].dim() == 3:
        caches = [x[:, None] for x in caches]
        k_scale, v_scale = (None if s is None else s[:, None] for s in (k_scale, v_scale))
    for name, cache, x in (("k_cache", caches[0], k), ("v_cache", caches[1], v)):
        if cache.dim() != 4 or cache.shape[2:] != (x.shape[1], x.shape[3]):
            form = f"[pages, page, {x.shape[1]}, {x.shape[3]}]"
            refuse(op, f"{name} must be {form}, as {name[0]} has heads, got {shape(cache)}")
    if caches[0].shape[:2] != caches[1].shape[:2]:
        found = f"got {shape(caches[0])} and {shape(caches[1])}"
        refuse(op, f"both caches must have as many pages of as many rows; {found}")
    _expect_scale(op, "k_scale", k_scale, caches[0])
    _expect_scale(op, "v_scale", v_scale, caches[1])
    everything = {"k": k, "v": v, "k_cache": caches[0], "v_cache": caches[1], "slots": slots}
    expect_same_device(op, **everything, k_scale=k_scale, v_scale=v_scale)
    _expect_slots(op, slots, caches[0].shape[0] * caches[0].shape[1])
    _write(k, v, *caches, k_scale, v_scale, slots)


def _expect_scale(op: str, name: str, scale: Tensor | None, cache: Tensor) -> None:
    if scale is None:
        if cache.dtype == torch.int8:
            refuse(op, f"{name} must be given for int8, to write the scale of each token to")
        return
    if cache.dtype not in CODES:
        refuse(op, f"{name} is for caches of 8 bits")
    if scale.dtype != torch.float32 or scale.shape != cache.shape[:3]:
        found = f"got {scale.dtype} {shape(scale)}"
        refuse(op, f"{name} must be float32 of the shape {list(cache.shape[:3])}; {found}")


def _expect_slots(op: str, slots: Tensor, rows: int) -> None:
    if can_be_read(slots) and slots.numel():
        least, most = (int(n) for n in slots.aminmax())
        if least < -1 or most >= rows:
            refuse(op, f"slots must be -1 or one of the {rows} rows; got {least} to {most}")


@_write.reference
def _(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    slots: Tensor,
) -> None:
    place = slots.reshape(-1).long()
    rows = k_cache.shape[0] * k_cache.shape[1]
    # of each row the token that it gets, -1 for none; tokens without a slot share the last one
    given = torch.full((rows + 1,), -1, device=slots.device)
    given[torch.where(place < 0, rows, place)] = torch.arange(place.numel(), device=slots.device)
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        # [tokens, Hk, D]
        new = x.transpose(1, 2).flatten(0, 1)
        if cache.dtype in CODES:
            new, each = encoded(new, cache.dtype, scale is not None)
            if scale is not None:
                _put(scale, given[:-1], each.to(scale.dtype))
        _put(cache, given[:-1], new)


def _put(to: Tensor, given: Tensor, new: Tensor) -> None:
    """Rows of `to` [pages, page, ...] that are given a token become it."""
    if new.numel() == 0:
        return
    of_row = given.view(to.shape[:2])
    is_given = (of_row >= 0).view(*to.shape[:2], *(1,) * (to.dim() - 2))
    to.copy_(torch.where(is_given, new[of_row.clamp(min=0)], to))


def _new(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    k, v = torch.randn(2, 3, 4, 16).to(dtype), torch.randn(2, 3, 4, 9).to(dtype)
    return k, v, torch.tensor([[5, 2, -1, 30], [0, 31, 12, -1]])


@_write.example
def _(dtype: torch.dtype) -> Example:
    k, v, slots = _new(dtype)
    caches = (torch.zeros(4, 8, 3, n).to(dtype) for n in (16, 9))
    return Example((k, v, *caches, None, None, slots), reduces_over=1)


@_write.example
def _(dtype: torch.dtype) -> Example:
    k, v, slots = _new(dtype)
    caches = (torch.zeros(4, 8, 3, n, dtype=torch.int8) for n in (16, 9))
    scales = (torch.zeros(4, 8, 3) for _ in range(2))
    return Example((k, v, *caches, *scales, slots), reduces_over=1)
