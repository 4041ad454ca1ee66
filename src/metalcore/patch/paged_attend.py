# SPDX-License-Identifier: MIT
"""Attention over a cache in pages, for the function of transformers' AttentionInterface."""

from typing import Any

import torch
from torch import Tensor

from metalcore.ops.attention.paged_attention import paged_attention
from metalcore.patch.attention_masks import Seen
from metalcore.patch.paged_layer import Pages


def attend_pages(
    query: Tensor, layer: Pages, mask: Tensor | None, seen: Seen, **options: Any
) -> Tensor | None:
    """[B, H, Tq, D], or None for what pages are not read for: then the keys are needed in one
    piece. `mask` [B, 1, 1, Tk] tells which keys are no padding."""
    queries = query.shape[2]
    if isinstance(seen.window, tuple) or not (seen.causal or queries == 1):
        return None
    if mask is None:
        pages = (layer.k, layer.v, layer.table)
        how = {"window": seen.window, **_scales(layer), **options}
        out: Tensor = paged_attention(query, *pages, layer.lengths, **how)
        return out
    if not seen.is_padded or queries > 1:
        return None
    keys = mask[:, 0, 0]
    if seen.window is not None and not _is_at_the_start(keys):
        return None
    return _without_padding(query, layer, keys, seen, options)


def _scales(layer: Pages) -> dict[str, Tensor | None]:
    return {"k_scale": layer.k_scale, "v_scale": layer.v_scale}


def _is_at_the_start(keys: Tensor) -> bool:
    """Whether padding comes before everything else: then distances stay what they are."""
    return bool((keys[:, 1:] >= keys[:, :-1]).all())


def _without_padding(
    query: Tensor, layer: Pages, keys: Tensor, seen: Seen, options: dict[str, Any]
) -> Tensor:
    """One query of each entry, over the rows of its keys."""
    counts = torch.nn.functional.pad(keys.sum(1, dtype=torch.int32).cumsum(0), (1, 0))
    starts = torch.arange(len(counts), device=query.device)
    scales = {n: None if s is None else s.flatten(0, 1) for n, s in _scales(layer).items()}
    rows = (layer.k.flatten(0, 1), layer.v.flatten(0, 1), layer.rows()[keys])
    how = {"window": seen.window, "cu_seqlens_q": starts, "cu_seqlens_k": counts}
    out: Tensor = paged_attention(query[:, :, 0], *rows, **how, **scales, **options)  # type: ignore[call-overload]
    return out[:, :, None]
