# SPDX-License-Identifier: MIT
"""Keys and values of all layers in one piece of memory, which a tape and transformers both use."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from metalcore import _native
from metalcore._check import expect
from metalcore.ops.attention._eight_bit import decoded, encoded

# slots that are added at once, at least
_SLOTS = 64


class Store:
    """Keys and values [layers, 2, rows, heads, slots, size]; of int8, with scales [layers, 2, rows,
    heads, slots]. It grows by doubling."""

    def __init__(self, layers: int, heads: int, size: int, dtype: torch.dtype) -> None:
        self._shape = (layers, heads, size)
        self.dtype = dtype
        self.scales: Tensor | None = None
        self.make(0, 0)

    def make(self, rows: int, slots: int) -> None:
        """New memory, of which nothing is written."""
        layers, heads, size = self._shape
        # of use outside of the block where it was made
        with torch.inference_mode(False):
            shape = (layers, 2, rows, heads, slots)
            self.values = _native.in_huge_pages(torch.empty(*shape, size, dtype=self.dtype))
            if self.dtype == torch.int8:
                self.scales = _native.in_huge_pages(torch.empty(shape))

    @property
    def parts(self) -> list[Tensor]:
        """Values, and scales where there are any; both [layers, 2, rows, heads, slots, ...]."""
        return [self.values] if self.scales is None else [self.values, self.scales]

    @property
    def rows(self) -> int:
        return self.values.shape[2]

    @property
    def slots(self) -> int:
        return self.values.shape[4]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def reserve(self, rows: int, slots: int, used: int) -> None:
        """Room for so many rows of so many slots; of the old ones, `used` are kept."""
        if rows <= self.rows and slots <= self.slots:
            return
        before = self.parts
        if slots > self.slots:
            slots = -(-max(slots, 2 * self.slots) // _SLOTS) * _SLOTS
        self.make(max(rows, self.rows), max(slots, self.slots))
        for old, new in zip(before, self.parts, strict=True):
            new[:, :, : old.shape[2], :, :used] = old[:, :, :, :, :used]

    def choose(self, rows: list[int], used: int) -> None:
        """The rows become those that were at these places, with their first `used` slots."""
        before = self.parts
        at = torch.tensor(rows)
        if len(rows) == self.rows:
            moved = at != torch.arange(len(rows))
            for part in before:
                part[:, :, moved, :, :used] = part[:, :, at[moved], :, :used]
            return
        self.make(len(rows), self.slots)
        for old, new in zip(before, self.parts, strict=True):
            new[:, :, :, :, :used] = old[:, :, at, :, :used]

    def write(self, layer: int, rows: slice, slots: slice, k: Tensor, v: Tensor) -> None:
        """Keys and values [rows, heads, slots, size] of a layer."""
        for i, x in enumerate((k, v)):
            at = (layer, i, rows, slice(None), slots)
            if self.scales is None:
                self.values[at] = x
            else:
                self.values[at], self.scales[at] = encoded(x, self.dtype, has_scale=True)

    def read(self, layer: int, rows: slice, end: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The first keys and values of a layer, [rows, heads, end, size] each."""
        at = (layer, slice(None), rows, slice(None), slice(end))
        found = self.values[at]
        if self.scales is not None:
            found = decoded(found, self.scales[at], torch.float32)
        keys, values = found.to(dtype).unbind()
        return keys, values


class DecoderLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer, for transformers."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: "DecoderCache", index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache, self.index = cache, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of new tokens; those of all tokens."""
        cache, new = self.cache, key_states.shape[2]
        begin, end = cache.length, cache.length + new
        self.is_initialized = True
        if self.index == 0:
            cache.reserve(key_states.shape[0], end)
        cache.store.write(self.index, cache.own, slice(begin, end), key_states, value_states)
        # all layers of a forward pass begin where the last pass ended
        if self.index == len(cache.layers) - 1:
            cache.length = end
        if begin == 0 and cache.store.scales is not None:
            # what a prompt sees of itself is not rounded
            return key_states, value_states
        return cache.store.read(self.index, cache.own, end, key_states.dtype)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.cache.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        if self.index == 0:
            self.cache.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.index == 0:
            self.cache.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.index == 0:
            self.cache.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.index == 0:
            self.cache.batch_select_indices(indices)


class DecoderCache(Cache):
    """A cache for `generate`: rows of a store that all have the same length.

    `metalcore.decoder(model).cache()` makes one. Both a tape and the model itself read and write
    it, so that any call may be computed by either.
    """

    def __init__(self, store: Store, first: int | None = None) -> None:
        """`first`: it is that one row of a store of others; without it, all rows are its own."""
        self.store, self.length, self._first = store, 0, first
        layers: list[Any] = [DecoderLayer(self, i) for i in range(store.values.shape[0])]
        super().__init__(layers=layers)

    @property
    def rows(self) -> int:
        return self.store.rows if self._first is None else 1

    @property
    def nbytes(self) -> int:
        """The memory of keys and values, used or not."""
        return self.store.nbytes

    @property
    def own(self) -> slice:
        """Its rows of the store."""
        return slice(None) if self._first is None else slice(self._first, self._first + 1)

    def reserve(self, rows: int, slots: int) -> None:
        """Room for the tokens of a forward pass."""
        if self._first is not None:
            return self.store.reserve(self.store.rows, slots, self.store.slots)
        expect(
            self.length == 0 or rows == self.rows,
            "DecoderCache",
            f"it holds {self.rows} sequences, and gets tokens of {rows}",
        )
        if self.length == 0 and rows != self.store.rows:
            self.store.make(0, self.store.slots)
        return self.store.reserve(rows, slots, self.length)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: -n for n of them."""
        found = f"crop takes -n to remove n tokens, got {tokens_to_remove}"
        expect(tokens_to_remove <= 0, "DecoderCache", found)
        self.length = max(0, self.length + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.length:
            self.store.choose(beam_idx.tolist(), self.length)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.store.choose([i for i in range(self.rows) for _ in range(repeats)], self.length)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.store.choose(torch.arange(self.rows)[indices.cpu()].tolist(), self.length)
