# SPDX-License-Identifier: MIT
"""What attention takes: checks of its arguments, and their one form for kernels."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from metalcore._check import (
    dtype_name,
    expect,
    expect_float,
    expect_same_device,
    expect_same_dtype,
    expect_tensors,
    is_eager,
    refuse,
    shape,
)

Window = int | tuple[int, int] | None


class Limits(NamedTuple):
    """How many keys before and after its own position a query sees; None for all there are."""

    left: int | None
    right: int | None


def as_heads(
    op: str, q: Tensor, k: Tensor, v: Tensor, are_packed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Views [B, H, T, D] of what the caller gave, which go together."""
    expect_float(op, q=q, k=k, v=v)
    expect_same_dtype(op, q=q, k=k, v=v)
    return as_heads_of_any(op, q, k, v, are_packed)


def as_heads_of_any(
    op: str, q: Tensor, k: Tensor, v: Tensor, are_packed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, where k and v may be of another dtype than q."""
    expect_same_device(op, q=q, k=k, v=v)
    ranks = (3,) if are_packed else (3, 4)
    form = "[T, H, D] with cu_seqlens" if are_packed else "[B, H, T, D] or [H, T, D]"
    if not (q.dim() == k.dim() == v.dim() and q.dim() in ranks):
        found = f"got q {shape(q)}, k {shape(k)} and v {shape(v)}"
        refuse(op, f"q, k and v must all be {form}; {found}")
    if are_packed:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    elif q.dim() == 3:
        q, k, v = q[None], k[None], v[None]
    if k.shape[:3] != v.shape[:3]:
        what = "entries, heads and keys"
        refuse(op, f"k and v must have the same {what}; got k {shape(k)} and v {shape(v)}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        refuse(op, f"q and k must have the same B and D; got q {shape(q)} and k {shape(k)}")
    heads, key_heads = q.shape[1], k.shape[1]
    if heads != key_heads and (key_heads == 0 or heads % key_heads):
        refuse(op, f"the {heads} heads of q must be a multiple of the {key_heads} of k and v")
    return q, k, v


def as_scale(scale: float | None, q: Tensor) -> float:
    """Of the products: D^-0.5 where the caller gave none."""
    if scale is not None:
        return float(scale)
    return float(q.shape[-1] ** -0.5 if q.shape[-1] else 1)


def as_left(op: str, window: int | None) -> int | None:
    """How many keys before its own position a query sees."""
    if window is None:
        return None
    expect(window > 0, op, f"window must be at least 1, the key itself, got {window}")
    return window - 1


def as_limits(op: str, causal: bool, window: Window) -> Limits:
    if window is None:
        left, right = -1, -1
    elif isinstance(window, int):
        expect(window > 0, op, f"window must be at least 1, the key itself, got {window}")
        left, right = window - 1, 0 if causal else window - 1
    else:
        left, right = window
        if left < -1 or right < -1:
            refuse(op, f"window must be (left, right), -1 for no limit, got {window}")
        if causal and right > 0:
            refuse(op, f"window must not reach ahead with causal=True, got {window}")
    right = 0 if causal else right
    return Limits(None if left == -1 else left, None if right == -1 else right)


def as_mask(op: str, mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The mask with the dimensions of the scores [B, H, Tq, Tk], 1 where it repeats."""
    expect_same_device(op, q=q, mask=mask)
    if mask.dtype not in (torch.bool, torch.float32, q.dtype):
        names = f"bool, float32 or the dtype of q, {dtype_name(q.dtype)}"
        raise TypeError(f"{op}: mask must be {names}; got {dtype_name(mask.dtype)}")
    size = (*q.shape[:3], k.shape[2])
    pairs = zip(reversed(mask.shape), reversed(size), strict=False)
    if mask.dim() > 4 or any(a not in (1, b) for a, b in pairs):
        form = "[B, H, Tq, Tk]" if torch.compiler.is_compiling() else f"{list(size)}"
        refuse(op, f"mask must broadcast to the scores, {form}; got {shape(mask)}")
    return mask[(None,) * (4 - mask.dim())]


def expect_per_head(
    op: str,
    name: str,
    x: Tensor | None,
    q: Tensor,
    *,
    per_entry: bool = False,
    entries: int | None = None,
) -> None:
    """`x` must be [H], or where `per_entry` is set also [B, H]; B is q's unless `entries` is."""
    if x is None:
        return
    expect_float(op, **{name: x})
    expect_same_device(op, q=q, **{name: x})
    heads = q.shape[1]
    allowed = [(heads,), (entries or q.shape[0], heads)] if per_entry else [(heads,)]
    if tuple(x.shape) not in allowed:
        form = " or ".join(str(list(a)) for a in dict.fromkeys(allowed))
        refuse(op, f"{name} must have the shape {form}, got {shape(x)}")


def expect_starts(
    op: str, starts_q: Tensor | None, starts_k: Tensor | None, q: int, k: int
) -> None:
    """cu_seqlens must both be there or neither, and go from 0 to the rows there are."""
    if starts_q is None and starts_k is None:
        return
    if starts_q is None or starts_k is None:
        refuse(op, "cu_seqlens_q and cu_seqlens_k must be given together")
    for name, starts, rows in (("cu_seqlens_q", starts_q, q), ("cu_seqlens_k", starts_k, k)):
        expect_start_of_each(op, name, starts, rows)
    if starts_q.numel() != starts_k.numel():
        found = f"got {starts_q.numel() - 1} and {starts_k.numel() - 1}"
        refuse(op, f"cu_seqlens_q and cu_seqlens_k must be of as many sequences; {found}")


def expect_start_of_each(op: str, name: str, starts: Tensor, rows: int) -> None:
    expect_integers(op, **{name: starts})
    if starts.dim() != 1 or starts.numel() == 0:
        refuse(op, f"{name} must be [sequences + 1], got {shape(starts)}")
    if can_be_read(starts):
        values = starts.tolist()
        if values[0] != 0 or values[-1] != rows or values != sorted(values):
            refuse(op, f"{name} must ascend from 0 to the {rows} rows, got {values}")


def expect_integers(op: str, **tensors: Tensor) -> None:
    for name, x in tensors.items():
        expect_tensors(op, **{name: x})
        if x.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{op}: {name} must be int32 or int64, got {dtype_name(x.dtype)}")


def expect_lengths(op: str, lengths: Tensor, entries: int, most: int) -> None:
    """One for each entry, none over the `most` keys there is room for."""
    expect_integers(op, lengths=lengths)
    if lengths.shape != (entries,):
        refuse(op, f"lengths must have the shape [{entries}], got {shape(lengths)}")
    if can_be_read(lengths):
        values = lengths.tolist()
        if any(not 0 <= n <= most for n in values):
            refuse(op, f"lengths must be from 0 to the {most} keys of the cache, got {values}")


def can_be_read(x: Tensor) -> bool:
    """Whether a look at the values costs nothing: on a GPU it would wait for it."""
    return x.is_cpu and is_eager() and type(x) is Tensor


def expect_numbers(op: str, scale: float, softcap: float | None) -> None:
    expect(math.isfinite(scale), op, f"scale must be finite, got {scale}")
    if softcap is not None:
        is_right = softcap > 0 and math.isfinite(softcap)
        expect(is_right, op, f"softcap must be greater than 0, got {softcap}")
