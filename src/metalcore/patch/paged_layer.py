# SPDX-License-Identifier: MIT
"""One layer of a cache in pages: keys and values stay where they were written, in 8 bits if wanted.

What `update` returns is a tensor without memory. Our attention takes the pages from it; everybody
else, who computes with it, gets the keys in one piece.
"""

from collections import Counter
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from metalcore._check import expect
from metalcore.ops.attention.copy_blocks import copy_blocks
from metalcore.ops.attention.paged_write import paged_write

# A full cache grows by this share of itself.
_GROWTH = 0.5
_NONE = -1


class Pages(Protocol):
    """What attention reads of a layer."""

    length: int
    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None

    @property
    def table(self) -> Tensor:
        """The pages of each entry, [B, n], of which -1 is none."""

    @property
    def lengths(self) -> Tensor:
        """The tokens of each entry, [B]."""

    def rows(self) -> Tensor:
        """Of each key of each entry its row in all pages, [B, T]."""

    def gather(self, is_key: bool, length: int, dtype: torch.dtype) -> Tensor:
        """The first keys or values in one piece, [B, Hk, T, D]."""


class PagedTensor(Tensor):
    """Keys or values [B, Hk, T, D] that lie in the pages of a layer."""

    layer: Pages
    fresh: Tensor | None
    _is_key: bool
    _computed: Tensor | None

    @staticmethod
    def __new__(cls, layer: Pages, is_key: bool, like: Tensor, fresh: bool) -> "PagedTensor":
        size = (*like.shape[:2], layer.length, like.shape[3])
        made: PagedTensor = Tensor._make_wrapper_subclass(
            cls, size, dtype=like.dtype, device=like.device, requires_grad=like.requires_grad
        )
        made.layer, made.fresh = layer, like if fresh else None
        made._is_key, made._computed = is_key, None
        return made

    def compute(self) -> Tensor:
        """The values in one piece; those of a prompt as they were given."""
        if self.fresh is not None:
            return self.fresh
        if self._computed is None:
            self._computed = self.layer.gather(self._is_key, self.shape[2], self.dtype)
        return self._computed

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return repr(self.compute())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = {name: _plain(a) for name, a in (kwargs or {}).items()}
        return func(*map(_plain, args), **named)


def _plain(a: Any) -> Any:
    if isinstance(a, PagedTensor):
        return a.compute()
    return type(a)(map(_plain, a)) if isinstance(a, (list, tuple)) else a


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one layer. Entries that share a past share its pages, until one of them
    writes; pages that a window has passed are used again."""

    is_compileable = False
    is_sliding = False
    supports_early_init = False

    def __init__(
        self, page: int, dtype: torch.dtype | None, tokens: int, sliding_window: int | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        is_power = page > 0 and page & (page - 1) == 0
        expect(is_power, "PagedCache", f"page must be a power of two, got {page}")
        self.page, self.storage, self._room = page, dtype, tokens
        self.sliding_window = sliding_window
        self.is_croppable = sliding_window is None
        self.length = 0
        self.k = self.v = torch.empty(0)
        self.k_scale: Tensor | None = None
        self.v_scale: Tensor | None = None
        # of each entry its pages, -1 for one that was given up; the same as a tensor
        self._pages: list[list[int]] = []
        self._users: Counter[int] = Counter()
        self._free: list[int] = []
        self._table: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        entries, heads, _, size = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        pages = max(1, entries * self._pages_for(self._room))
        kind = self.storage or self.dtype
        shapes = ((pages, self.page, heads, n) for n in (size, value_states.shape[3]))
        self.k, self.v = (torch.empty(s, dtype=kind, device=self.device) for s in shapes)
        if kind == torch.int8:
            scales = (torch.empty(pages, self.page, heads, device=self.device) for _ in range(2))
            self.k_scale, self.v_scale = scales
        self._free = list(range(pages - 1, -1, -1))
        self._pages = [[] for _ in range(entries)]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new tokens; all keys and all values, as tensors without memory."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        was_empty, new = self.length == 0, key_states.shape[2]
        self._give_up_passed()
        self._make_room(self.length + new)
        rows = self._rows(self.length, self.length + new)
        scales = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        paged_write(key_states, value_states, self.k, self.v, rows, **scales)
        self.length += new
        keys = PagedTensor(self, True, key_states, was_empty)
        return keys, PagedTensor(self, False, value_states, was_empty)

    @property
    def table(self) -> Tensor:
        """The pages of each entry, [B, n], of which -1 is none."""
        if self._table is None:
            self._table = torch.tensor(self._pages, dtype=torch.int32, device=self.device)
        return self._table

    @property
    def lengths(self) -> Tensor:
        """The tokens of each entry, [B]."""
        size = (len(self._pages),)
        return torch.full(size, self.length, dtype=torch.int32, device=self.device)

    def rows(self) -> Tensor:
        """Of each key of each entry its row in all pages, [B, T]."""
        return self._rows(0, self.length)

    def _rows(self, begin: int, end: int) -> Tensor:
        place = torch.arange(begin, end, device=self.device)
        pages = self.table[:, place // self.page].long()
        return torch.where(pages < 0, _NONE, pages * self.page + place % self.page)

    def gather(self, is_key: bool, length: int, dtype: torch.dtype) -> Tensor:
        """The first keys or values in one piece, [B, Hk, T, D]; those that were given up are 0."""
        cache, scale = (self.k, self.k_scale) if is_key else (self.v, self.v_scale)
        rows = self._rows(0, length)
        known = rows.clamp(min=0)
        found = cache.flatten(0, 1)[known].to(dtype if scale is None else torch.float32)
        if scale is not None:
            found = found * scale.flatten(0, 1)[known][..., None]
        return found.masked_fill((rows < 0)[..., None, None], 0).to(dtype).transpose(1, 2)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def _make_room(self, tokens: int) -> None:
        """Pages for so many tokens of each entry, of which those to be written are its own."""
        copied = []
        for pages in self._pages:
            if self.length % self.page and self._users[pages[-1]] > 1:
                # a page of several entries, into which one of them writes
                mine = self._take()
                copied.append((pages[-1], mine))
                self._drop(pages[-1])
                pages[-1], self._table = mine, None
            while len(pages) * self.page < tokens:
                pages.append(self._take())
                self._table = None
        if copied:
            stores = (self.k, self.v, self.k_scale, self.v_scale)
            copy_blocks([s for s in stores if s is not None], torch.tensor(copied))

    def _take(self) -> int:
        if not self._free:
            self._grow()
        page = self._free.pop()
        self._users[page] = 1
        return page

    def _drop(self, page: int) -> None:
        self._users[page] -= 1
        if self._users[page] == 0:
            del self._users[page]
            self._free.append(page)

    def _grow(self) -> None:
        before = self.k.shape[0]
        more = max(1, int(before * _GROWTH))

        def longer(x: Tensor) -> Tensor:
            return torch.cat([x, x.new_empty(more, *x.shape[1:])])

        self.k, self.v = longer(self.k), longer(self.v)
        if self.k_scale is not None and self.v_scale is not None:
            self.k_scale, self.v_scale = longer(self.k_scale), longer(self.v_scale)
        self._free = list(range(before + more - 1, before - 1, -1))

    def _give_up_passed(self) -> None:
        """The pages that the next query does not see."""
        if self.sliding_window is None:
            return
        passed = max(0, self.length - self.sliding_window + 1) // self.page
        for pages in self._pages:
            for i in range(passed - 1, -1, -1):
                if pages[i] == _NONE:
                    break
                self._drop(pages[i])
                pages[i], self._table = _NONE, None

    def _set_entries(self, chosen: list[int]) -> None:
        """The entries become those that were at these places."""
        before = self._pages
        self._pages = [list(before[i]) for i in chosen]
        for pages in self._pages:
            self._users.update(p for p in pages if p != _NONE)
        for pages in before:
            for page in pages:
                if page != _NONE:
                    self._drop(page)
        self._table = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.length:
            self._set_entries(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._set_entries([i for i in range(len(self._pages)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        entries = torch.arange(len(self._pages), device=indices.device)
        self._set_entries(entries[indices].tolist())

    def crop(self, tokens_to_remove: int) -> None:
        found = f"crop takes -n to remove n tokens, got {tokens_to_remove}"
        expect(tokens_to_remove <= 0, "PagedCache", found)
        expect(self.is_croppable, "PagedCache", "a layer with a window cannot be cropped")
        self.length = max(0, self.length + tokens_to_remove)
        kept = self._pages_for(self.length)
        for pages in self._pages:
            while len(pages) > kept:
                self._drop(pages.pop())
                self._table = None

    def reset(self) -> None:
        self.length, self.is_initialized = 0, False
        self.k = self.v = torch.empty(0)
        self.k_scale = self.v_scale = self._table = None
        self._users.clear()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1
