# SPDX-License-Identifier: MIT
"""Arguments of `paged_attention`, for tests: sequences whose keys lie in pages in any order."""

from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor

import metalcore

STORED = {"int8": torch.int8, "float8": torch.uint8}


class Pages(NamedTuple):
    """Sizes, what the cache holds, and which of the arguments there are."""

    why: str
    lengths: tuple[int, ...] = (50, 17)
    queries: tuple[int, ...] = (1, 1)
    page: int = 16
    heads: tuple[int, int] = (4, 2)
    size: tuple[int, int] = (16, 16)
    stored: str = ""
    scales: bool = True
    packed: bool = False
    rows: bool = False
    alibi: str = ""
    sinks: bool = False
    softcap: float | None = None
    left: int | None = None

    @property
    def reduces_over(self) -> int:
        return max(self.size) + max(self.lengths)

    def args(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """What the op takes. What no sequence has is NaN, or the code for it."""
        generator = torch.Generator().manual_seed(0)
        table, slots = self._places(generator)
        caches, scales = self._cache(slots, dtype)
        H, D, B = self.heads[0], self.size[0], len(self.lengths)
        if self.packed or self.rows:
            q = torch.randn(1, H, sum(self.queries), D).to(dtype)
        else:
            q = torch.randn(B, H, self.queries[0], D).to(dtype)
        starts_q = _starts(self.queries) if self.packed or self.rows else None
        places: tuple[Any, ...] = (table, torch.tensor(self.lengths), starts_q, None)
        if self.rows:
            caches = tuple(x.flatten(0, 1)[:, None] for x in caches)
            scales = tuple(None if s is None else s.flatten(0, 1)[:, None] for s in scales)
            places = (torch.cat(slots), None, starts_q, _starts(self.lengths))
        slopes = {"": None, "heads": torch.rand(H), "entries": torch.rand(B, H)}[self.alibi]
        sinks = torch.randn(H).to(dtype) if self.sinks else None
        numbers = (D**-0.5, self.softcap, self.left)
        return q, *caches, *scales, *places, slopes, sinks, *numbers

    def _places(self, generator: torch.Generator) -> tuple[Tensor, list[Tensor]]:
        """The pages of each sequence, -1 after the last; and the row of each key."""
        counts = [-(-n // self.page) for n in self.lengths]
        order = torch.randperm(sum(counts) + 2, generator=generator)[: sum(counts)]
        table = torch.full((len(counts), max(1, *counts)), -1)
        slots = []
        for b, pages in enumerate(order.split(counts)):
            table[b, : counts[b]] = pages
            key = torch.arange(self.lengths[b])
            slots.append(table[b, key // self.page] * self.page + key % self.page)
        return table, slots

    def _cache(
        self, slots: list[Tensor], dtype: torch.dtype
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        at = torch.cat(slots)
        pages, heads = sum(-(-n // self.page) for n in self.lengths) + 2, self.heads[1]
        new = [torch.randn(len(at), heads, n).to(dtype) for n in self.size]
        kind = STORED.get(self.stored, dtype)
        empty = nan if kind == dtype else 0x7F
        caches = [torch.full((pages, self.page, heads, n), empty, dtype=kind) for n in self.size]
        scales: list[Tensor | None] = [None, None]
        if self.stored and self.scales:
            scales = [torch.full((pages, self.page, heads), nan) for _ in range(2)]
        metalcore.paged_write(*new, *caches, at, k_scale=scales[0], v_scale=scales[1])
        return tuple(caches), tuple(scales)


def _starts(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


CASES = [
    Pages("one query"),
    Pages("a sequence without keys", lengths=(33, 0, 1), queries=(1, 1, 1)),
    Pages("more parts than one", lengths=(1100, 513), heads=(6, 2), size=(24, 40)),
    Pages("window and sinks", lengths=(300, 90), left=70, sinks=True),
    Pages("soft cap and slopes", queries=(3, 3), softcap=2.0, alibi="entries"),
    Pages("odd heads", heads=(7, 1), size=(7, 37), page=4, queries=(2, 2)),
    Pages("all heads alone", heads=(3, 3), size=(80, 33), page=32),
    Pages("packed queries", queries=(5, 1), packed=True, alibi="entries", sinks=True),
    Pages("rows of their own", rows=True, queries=(1, 4), left=20),
    Pages("many queries", lengths=(150, 130), queries=(60, 60), size=(32, 16), page=8),
    Pages("many queries, packed", lengths=(150, 9), queries=(70, 9), packed=True, left=40),
    Pages("int8", stored="int8", lengths=(90, 17)),
    Pages("int8 in parts", stored="int8", lengths=(700, 17), size=(40, 24), sinks=True, left=600),
    Pages("int8 rows", stored="int8", rows=True, queries=(2, 3)),
    Pages("int8 and many queries", stored="int8", lengths=(90, 60), queries=(40, 40)),
    Pages("float8", stored="float8", heads=(4, 1), size=(33, 16)),
    Pages("float8 without scales", stored="float8", scales=False, softcap=3.0),
    Pages("float8 and many queries", stored="float8", lengths=(90, 60), queries=(40, 40)),
]
