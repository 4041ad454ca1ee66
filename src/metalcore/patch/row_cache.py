# SPDX-License-Identifier: MIT
"""A cache of rows, each of its own length, that come and go: what a server batches answers with.

A forward is for some of the rows. Their new tokens go into pages of one store per layer, and our
attention reads them there, each row as long as it is: there is no padding and no mask.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from metalcore._check import expect, refuse
from metalcore.ops.attention.paged_write import paged_write
from metalcore.patch.paged_layer import PagedTensor

_NONE = -1
# Stores that are full grow by this share of themselves.
_GROWTH = 0.5


class RowTable:
    """The pages of each row, for all layers that see as far back as each other."""

    def __init__(self, page: int, window: int | None) -> None:
        self.page, self.window = page, window
        self.pages: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.count = 0
        self._free: list[int] = []
        # of the rows of a forward: the longest before it, and all as the layers take them
        self.longest, self.new = 0, 0
        self.is_fresh = False
        self.table = self.slots = self.chosen_lengths = torch.empty(0)

    def choose(self, rows: list[int], new: int, device: torch.device) -> None:
        """Make room for `new` tokens of each of `rows`, which a forward is to write."""
        before = [self.lengths.setdefault(row, 0) for row in rows]
        self.longest, self.new, self.is_fresh = max(before), new, not any(before)
        slots = []
        for row, length in zip(rows, before, strict=True):
            pages = self.pages.setdefault(row, [])
            self._give_up_passed(pages, length)
            while len(pages) * self.page < length + new:
                pages.append(self._take())
            self.lengths[row] = length + new
            places = range(length, length + new)
            slots.append([pages[t // self.page] * self.page + t % self.page for t in places])
        most = max(len(self.pages[row]) for row in rows)
        filled = [self.pages[row] + [_NONE] * (most - len(self.pages[row])) for row in rows]
        self.table = torch.tensor(filled, dtype=torch.int32, device=device)
        self.slots = torch.tensor(slots, dtype=torch.int32, device=device)
        lengths = [self.lengths[row] for row in rows]
        self.chosen_lengths = torch.tensor(lengths, dtype=torch.int32, device=device)

    def drop(self, row: int) -> None:
        """The row is no more; its pages are free."""
        self._free += [page for page in self.pages.pop(row, []) if page != _NONE]
        self.lengths.pop(row, None)

    @property
    def used(self) -> int:
        return self.count - len(self._free)

    def _take(self) -> int:
        if not self._free:
            more = max(1, int(self.count * _GROWTH))
            self._free = list(range(self.count + more - 1, self.count - 1, -1))
            self.count += more
        return self._free.pop()

    def _give_up_passed(self, pages: list[int], length: int) -> None:
        """The pages that the next query of a row does not see."""
        if self.window is None:
            return
        for i in range(max(0, length - self.window + 1) // self.page - 1, -1, -1):
            if pages[i] == _NONE:
                break
            self._free.append(pages[i])
            pages[i] = _NONE


class RowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of all rows in one layer."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, table: RowTable, dtype: torch.dtype | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows_of, self.storage = table, dtype
        self.length = 0
        self.k = self.v = torch.empty(0)
        self.k_scale: Tensor | None = None
        self.v_scale: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        kind = self.storage or key_states.dtype
        page, heads = self.rows_of.page, key_states.shape[1]
        sizes = (key_states.shape[3], value_states.shape[3])
        self.k, self.v = (key_states.new_empty(0, page, heads, n, dtype=kind) for n in sizes)
        if kind == torch.int8:
            scales = (key_states.new_empty(0, page, heads, dtype=torch.float32) for _ in range(2))
            self.k_scale, self.v_scale = scales
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new tokens of the chosen rows; all their keys and values, as tensors without
        memory."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._grow()
        of, scales = self.rows_of, {"k_scale": self.k_scale, "v_scale": self.v_scale}
        paged_write(key_states, value_states, self.k, self.v, of.slots, **scales)
        self.length = of.longest + of.new
        keys = PagedTensor(self, True, key_states, of.is_fresh)
        return keys, PagedTensor(self, False, value_states, of.is_fresh)

    @property
    def table(self) -> Tensor:
        """The pages of each chosen row, [B, n], of which -1 is none."""
        return self.rows_of.table

    @property
    def lengths(self) -> Tensor:
        """The tokens of each chosen row, [B]."""
        return self.rows_of.chosen_lengths

    def rows(self) -> NoReturn:
        refuse("RowCache", "rows have no padding")

    def gather(self, is_key: bool, length: int, dtype: torch.dtype) -> NoReturn:
        refuse("RowCache", "rows of several lengths are read by metalcore's attention alone")

    def _grow(self) -> None:
        more = self.rows_of.count - self.k.shape[0]
        if more <= 0:
            return

        def longer(x: Tensor) -> Tensor:
            return torch.cat([x, x.new_empty(more, *x.shape[1:])])

        self.k, self.v = longer(self.k), longer(self.v)
        if self.k_scale is not None and self.v_scale is not None:
            self.k_scale, self.v_scale = longer(self.k_scale), longer(self.v_scale)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.rows_of.longest + query_length, 0

    def get_seq_length(self) -> int:
        return self.rows_of.longest

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):
    """Keys and values of rows that come and go, for forwards of an accelerated model.

    Args:
        config: of the model.
        page: tokens of a page, a power of two.
        dtype: of what is kept: None as the model computes, torch.int8 or torch.float8_e4m3fn.

    Example:
        >>> cache = RowCache(model.config)
        >>> cache.choose([0, 3], 1, model.device)
        >>> model(input_ids=tokens, position_ids=positions, past_key_values=cache)
        >>> cache.drop(3)
    """

    def __init__(self, config: Any, *, page: int = 16, dtype: torch.dtype | None = None) -> None:
        self.tables: dict[int | None, RowTable] = {}
        super().__init__(
            layers=[self._layer(one, page, dtype) for one in DynamicCache(config=config).layers]
        )

    def _layer(self, like: Any, page: int, dtype: torch.dtype | None) -> RowLayer:
        kinds = (DynamicLayer, DynamicSlidingWindowLayer)
        found = f"layers must keep keys and values, got {type(like).__name__}"
        expect(type(like) in kinds, "RowCache", found)
        window = like.sliding_window if type(like) is DynamicSlidingWindowLayer else None
        return RowLayer(self.tables.setdefault(window, RowTable(page, window)), dtype)

    def choose(self, rows: list[int], new: int, device: torch.device) -> None:
        """The next forward is for `new` tokens of each of `rows`."""
        for table in self.tables.values():
            table.choose(rows, new, device)

    def drop(self, row: int) -> None:
        """Forget a row."""
        for table in self.tables.values():
            table.drop(row)

    @property
    def used_pages(self) -> int:
        """Pages that rows have, over layers of each window."""
        return sum(table.used for table in self.tables.values())
