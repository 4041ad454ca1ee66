# SPDX-License-Identifier: MIT
"""Continuous batching of transformers (`generate_batch`) with attention that reads the cache in
place.

transformers takes no other names than its own there, so ours stands for "sdpa" while a block runs,
and for calls with its paged cache alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from metalcore.ops.attention.attention import attention
from metalcore.ops.attention.paged_attention import paged_attention
from metalcore.patch.attention import find

_NAME = "sdpa"


@contextmanager
def continuous_batching(model: nn.Module) -> Iterator[None]:
    """A block in which `model.generate_batch` computes attention with metalcore.

    Keys and values are read where transformers' cache has them, without a copy of all of them for
    each token, and soft caps and sinks are no reason for a matrix of scores. The model may be an
    accelerated one.

    Args:
        model: a transformers model.

    Example:
        >>> with metalcore.continuous_batching(model):
        ...     texts = model.generate_batch(prompts, generation_config=config)
    """
    configs = {id(layers.model.config): layers.model.config for layers in find(model)}
    before = {key: config._attn_implementation for key, config in configs.items()}
    original = AttentionInterface()[_NAME]  # type: ignore[no-untyped-call]

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **how: Any
    ) -> Any:
        found = _attend(module, query, key, value, how)
        return original(module, query, key, value, mask, **how) if found is None else (found, None)

    AttentionInterface.register(_NAME, attend)
    for config in configs.values():
        # no other config within it
        config._attn_implementation = {"": _NAME}
    try:
        yield
    finally:
        AttentionInterface.register(_NAME, original)
        for key, config in configs.items():
            config._attn_implementation = {"": before[key]}


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, how: dict[str, Any]
) -> Tensor | None:
    """[1, Tq, H, D] of sequences one after the other; None for what is left to transformers."""
    cache = how.get("cache")
    if not isinstance(cache, PagedAttentionCache) or how.get("block_table") is not None:
        return None
    allocator = cache.layer_to_allocator[module.layer_idx]
    starts_q, starts_k = how["cu_seq_lens_q"], how["cu_seq_lens_k"][allocator.layer_type]
    read, write = (how[name][allocator.index] for name in ("read_index", "write_index"))
    is_read = read.numel() > 0
    # padded for graphs of a GPU
    keys = read.numel() if is_read else query.shape[2]
    if int(starts_q[-1]) != query.shape[2] or int(starts_k[-1]) != keys:
        return None
    options: dict[str, Any] = {
        "window": how.get("sliding_window"),
        "softcap": how.get("softcap"),
        "sinks": how.get("s_aux"),
        "scale": how.get("scaling"),
        "cu_seqlens_q": starts_q,
        "cu_seqlens_k": starts_k.to(starts_q.dtype),
    }
    views = getattr(allocator, "_kv_token_views", {}).get(module.layer_idx)
    rows = query[0].transpose(0, 1)
    if is_read and views is not None and allocator.layer_type == "full_attention":
        for view, new in zip(views, (key, value), strict=True):
            view.index_copy_(0, write, new[0].transpose(0, 1))
        # one of them may have rows that the other has not
        count = min(map(len, views))
        k, v = (view[:count] for view in views)
        return cast(Tensor, paged_attention(rows, k, v, read, **options))[None]
    key, value = cache.update(
        key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=how
    )
    k, v = (x[0].transpose(0, 1) for x in (key, value))
    return cast(Tensor, attention(rows, k, v, causal=True, **options))[None]
