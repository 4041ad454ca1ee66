# SPDX-License-Identifier: MIT
"""Attention with the arguments, the meaning and the layout of torch's function of that name."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metalcore._check import FLOATS
from metalcore._route import Queries
from metalcore.ops.attention.attention import attention

_DEVICES = ("cpu", "mps")
# keys that few queries are measured with
_KEYS = 128


def _arguments(mask: bool, causal: bool) -> Callable[[Tensor], tuple[Any, ...]]:
    def make(q: Tensor) -> tuple[Any, ...]:
        keys = max(q.shape[-2], _KEYS)
        k, v = torch.randn(2, *q.shape[:-2], keys, q.shape[-1]).to(q.dtype)
        visible = torch.rand(q.shape[-2], keys) < 0.8 if mask else None
        return q, k, v, visible, 0.0, causal

    return make


# torch adds gradients of half types up in these
ROUTES = {
    case: Queries(
        "scaled_dot_product_attention",
        case,
        _arguments(case == "mask", case == "causal"),
        torch_rounds="gradients",
    )
    for case in ("full", "causal", "mask")
}


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, with all its arguments and its meaning.

    It is `attention` where that is ahead. Dropout, gradients of a mask, and shapes that torch
    broadcasts are left to torch; a trace shows these with the path `torch`.

    Args:
        query: [..., H, Tq, D].
        key, value: [..., H, Tk, D] and [..., H, Tk, Dv].
        attn_mask: broadcastable to [..., H, Tq, Tk]: True where a query sees a key, or numbers to
            add to the scores.
        dropout_p: the share of weights that are dropped.
        is_causal: query i sees the keys up to i, also where there are more keys than queries.
        scale: of the products, D^-0.5 if it is None.
        enable_gqa: key and value may have fewer heads than query.

    Returns:
        [..., H, Tq, Dv], laid out as torch does.

    Example:
        >>> y = metalcore.scaled_dot_product_attention(q, k, v, is_causal=True)
    """
    route = ROUTES[case_of(attn_mask, is_causal)]
    if not takes(query, key, value, attn_mask, dropout_p, enable_gqa) or route.prefers_torch(
        query, key, value
    ):
        how = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        torchs = F.scaled_dot_product_attention
        return route.by_torch(torchs, query, key, value, attn_mask, enable_gqa=enable_gqa, **how)
    return compute(query, key, value, attn_mask, is_causal, scale)


def case_of(mask: Tensor | None, is_causal: bool) -> str:
    return "mask" if mask is not None else "causal" if is_causal else "full"


def takes(q: Any, k: Any, v: Any, mask: Any, dropout: Any, enable_gqa: Any) -> bool:
    """Whether `compute` gives what torch does; it says itself what is wrong with the rest."""
    if not all(isinstance(x, Tensor) and not x.is_nested for x in (q, k, v)) or dropout != 0:
        return False
    if q.dtype not in FLOATS or k.dtype is not q.dtype or v.dtype is not q.dtype:
        return False
    if q.device.type not in _DEVICES or not q.device == k.device == v.device:
        return False
    if q.dim() not in (3, 4) or k.dim() != q.dim() or k.shape[:-1] != v.shape[:-1]:
        return False
    heads, key_heads = q.shape[-3], k.shape[-3]
    shared = enable_gqa is True and q.dim() == 4 and key_heads > 0 and heads % key_heads == 0
    if q.shape[:-3] != k.shape[:-3] or not (heads == key_heads or shared):
        return False
    if q.shape[-1] != k.shape[-1] or 0 in q.shape or 0 in k.shape or 0 in v.shape:
        return False
    return mask is None or _takes_mask(mask, q, k)


def _takes_mask(mask: Any, q: Tensor, k: Tensor) -> bool:
    if not isinstance(mask, Tensor) or mask.requires_grad or mask.device != q.device:
        return False
    if mask.dtype not in (torch.bool, torch.float32, q.dtype) or mask.dim() < 2:
        return False
    size = (*q.shape[:-1], k.shape[-2])
    pairs = zip(reversed(mask.shape), reversed(size), strict=False)
    return mask.dim() <= q.dim() and all(a in (1, b) for a, b in pairs)


def compute(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """The attention of arguments that `takes` holds for, by our kernels."""
    queries, keys = q.shape[-2], k.shape[-2]
    window = None
    if is_causal and queries < keys:
        k, v = k[..., :queries, :], v[..., :queries, :]
        mask = mask[..., :queries] if mask is not None and mask.shape[-1] > 1 else mask
    elif is_causal and queries > keys:
        # ours has the last query at the last key
        is_causal, window = False, (-1, queries - keys)
    run = partial(attention, causal=is_causal, window=window, scale=scale)
    if _has_rows_first(q, v):
        return run(q, k, v, mask=mask)
    entries = q.shape[:-2]
    if q.shape[-3] == k.shape[-3] and (mask is None or mask.shape[:-2].numel() == 1):
        # one head for each entry: its rows follow each other
        q, k, v = (x.flatten(0, -3)[:, None] for x in (q, k, v))
        mask = mask if mask is None else mask.view(mask.shape[-2:])
        return run(q, k, v, mask=mask).view(*entries, queries, v.shape[-1])
    return run(q, k, v, mask=mask).contiguous()


def _has_rows_first(q: Tensor, v: Tensor) -> bool:
    """Whether torch's result has the heads of a row side by side in memory: where they are so in
    the queries, and its kernel computes them."""
    return (
        q.dim() == 4
        and q.shape[-1] == v.shape[-1]
        and q.stride(-1) == 1
        and q.shape[1] > 1
        and q.shape[2] > 1
        and q.stride(1) < q.stride(2)
    )
