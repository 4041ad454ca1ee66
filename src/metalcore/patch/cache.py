# SPDX-License-Identifier: MIT
"""Caches for `generate()` of transformers: keys and values in pages, and in 8 bits."""

from functools import partial
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from metalcore._check import expect
from metalcore.patch.paged_layer import PagedLayer

_STORED = (None, torch.int8, torch.float8_e4m3fn)


class PagedCache(Cache):
    """Keys and values in pages, for `model.generate(..., past_key_values=cache)`.

    No step copies what is there already, beams share the pages of their past, and layers with a
    window keep no more than it. An accelerated model reads the pages where they are; others get
    keys and values in one piece.

    Args:
        config: of the model, which tells what its layers keep; without it all keep everything.
        page: tokens of a page, a power of two.
        tokens: room that is made at once for so many tokens of each entry; it grows.
        dtype: of what is kept: None as the model computes, torch.int8 or torch.float8_e4m3fn.

    Example:
        >>> cache = metalcore.PagedCache(model.config)
        >>> model.generate(tokens, past_key_values=cache, max_new_tokens=20)
    """

    def __init__(
        self,
        config: Any = None,
        *,
        page: int = 16,
        tokens: int = 256,
        dtype: torch.dtype | None = None,
    ) -> None:
        names = "None, torch.int8 or torch.float8_e4m3fn"
        expect(dtype in _STORED, "PagedCache", f"dtype must be {names}, got {dtype}")
        make = partial(PagedLayer, page, dtype, tokens)
        if config is None:
            super().__init__(layer_class_to_replicate=make)  # type: ignore[arg-type]
            return
        # a state of something else than attention stays what it is
        layers = [
            make(layer.sliding_window)
            if type(layer) is DynamicSlidingWindowLayer
            else make()
            if type(layer) is DynamicLayer
            else layer
            for layer in DynamicCache(config=config).layers
        ]
        super().__init__(layers=layers)

    @property
    def nbytes(self) -> int:
        """The memory of all pages, used or not, with their scales."""
        stores = (
            x
            for layer in self.layers
            if isinstance(layer, PagedLayer)
            for x in (layer.k, layer.v, layer.k_scale, layer.v_scale)
        )
        return sum(x.nbytes for x in stores if x is not None)


class QuantizedCache(PagedCache):
    """A `PagedCache` in 8 bits, which an accelerated model reads as they are: half the memory of
    float16, and half the time where memory is what takes it.

    int8 has a scale for each token and head. A prompt is attended to as it is given; what follows
    sees it rounded, by at most 1/254 of the largest value of each token and head.

    Args:
        config, page, tokens: as for `PagedCache`.
        dtype: torch.int8, or torch.float8_e4m3fn, which keeps less of it.

    Example:
        >>> cache = metalcore.QuantizedCache(model.config)
        >>> model.generate(tokens, past_key_values=cache, max_new_tokens=20)
    """

    def __init__(
        self,
        config: Any = None,
        *,
        page: int = 16,
        tokens: int = 256,
        dtype: torch.dtype = torch.int8,
    ) -> None:
        super().__init__(config, page=page, tokens=tokens, dtype=dtype)
