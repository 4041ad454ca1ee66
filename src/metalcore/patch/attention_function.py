# SPDX-License-Identifier: MIT
"""Attention as a function of transformers' AttentionInterface."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metalcore import _trace
from metalcore.metal.attention._over_cache import most_rows
from metalcore.ops.attention.attention import attention
from metalcore.ops.attention.attention_decode import attention_decode
from metalcore.patch.attention_masks import Seen, seen_of
from metalcore.patch.paged_attend import attend_pages
from metalcore.patch.paged_layer import PagedTensor


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """What a layer of transformers asks of its attention; [B, Tq, H, D], and the weights where
    they are wanted."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options: dict[str, Any] = {"softcap": softcap, "sinks": s_aux, "scale": scaling}
    needs_scores = dropout > 0 or others.get("output_attentions", False)
    mask, seen = attention_mask, Seen(False)
    if attention_mask is not None and attention_mask.dim() == 2:
        seen = seen_of(attention_mask) or Seen(causal, sliding_window, is_padded=True)
        mask = attention_mask[:, None, None] if seen.is_padded else None
    if isinstance(key, PagedTensor):
        if key.fresh is None and position_bias is None and not needs_scores:
            found = attend_pages(query, key.layer, mask, seen, **options)
            if found is not None:
                return found.transpose(1, 2).contiguous(), None
        key, value = key.compute(), value.compute()  # type: ignore[attr-defined]
    if attention_mask is None:
        key, value, mask, seen = _without_mask(query, key, value, causal)
    if position_bias is not None:
        bias = position_bias[..., : key.shape[2]]
        mask = bias if mask is None else _add(mask, bias)
    if needs_scores:
        _trace.record_torch_path("attention", query)
        return _by_torch(query, key, value, mask, seen, dropout, scaling, softcap, s_aux)
    if _may_decode(query, key, value, mask, seen):
        out = attention_decode(query, key, value, window=seen.window, **options)  # type: ignore[arg-type]
    else:
        if mask is not None and mask.dtype not in (torch.bool, torch.float32, query.dtype):
            mask = mask.to(query.dtype)
        how = {"mask": mask, "causal": seen.causal, "window": seen.window, **options}
        out = attention(query, key, value, **how)
    return out.transpose(1, 2).contiguous(), None


def _without_mask(
    query: Tensor, key: Tensor, value: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor | None, Seen]:
    """As torch's own attention: the first query stands at the first key, and a single one sees
    all keys."""
    queries, keys = query.shape[2], key.shape[2]
    if not causal or queries == 1:
        return key, value, None, Seen(False)
    if queries > keys:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
        return key, value, mask, Seen(False)
    return key[:, :, :queries], value[:, :, :queries], None, Seen(True)


def _add(mask: Tensor, bias: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return bias.masked_fill(~mask, -torch.inf)
    return mask + bias


def _may_decode(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seen: Seen) -> bool:
    """Whether so few queries share the keys and values of a cache that these are read once."""
    queries, group = query.shape[2], query.shape[1] // key.shape[1]
    are_few = group * queries <= most_rows(max(query.shape[3], value.shape[3]))
    return (
        mask is None
        and (queries == 1 or (seen.causal and queries < key.shape[2] and are_few))
        and not isinstance(seen.window, tuple)
        and not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad))
    )


def _by_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seen: Seen,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """With a matrix of scores, which dropout and the weights need."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query @ key.mT * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    visible = _visible(query, key, seen)
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    elif mask is not None:
        scores = scores + mask
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    if sinks is not None:
        column = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    weights = weights if sinks is None else weights[..., :-1]
    weights = F.dropout(weights, dropout)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def _visible(query: Tensor, key: Tensor, seen: Seen) -> Tensor:
    """Which keys a query sees by its position, [Tq, Tk]."""
    queries, keys = query.shape[2], key.shape[2]
    position = torch.arange(queries, device=query.device)[:, None] + keys - queries
    distance = position - torch.arange(keys, device=query.device)
    window = seen.window
    left, right = window if isinstance(window, tuple) else (None, None)
    if isinstance(window, int):
        left = window - 1
    if seen.causal:
        right = 0
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        visible = visible & (distance <= left)
    if right is not None:
        visible = visible & (distance >= -right)
    return visible
