# SPDX-License-Identifier: MIT
"""What programs over a cache share: rows of all heads that share keys, parts of the keys, and the
merge of these."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from metalcore.metal.attention.attention import MOST_VALUES, TILE, Shape, are_far
from metalcore.metal.program import (
    MAX_THREADGROUP_BYTES,
    MSL_TYPE,
    SIMD_WIDTH,
    Arguments,
    Buffer,
    Program,
    round_up,
)

MERGE = "attention/attention_decode.metal"
# codes of 8 bits, and what else a cache holds
CODES = {torch.int8: "char", torch.uint8: "uchar"}
STORED = {**CODES, **MSL_TYPE}


def most_rows(width: int) -> int:
    """Queries of heads of `width`, of all that share keys, for which a threadgroup reads these
    once."""
    return TILE * (4 if width <= 128 else 2 if width <= 256 else 1)


class Rows(NamedTuple):
    """A tensor of the cache: its memory, and steps by entry, head and row."""

    memory: Buffer
    steps: tuple[int, ...]


class OverCache:
    """A call, as its kernels take it. `k` and `v` are [entries, Hk, rows, D], of one entry where
    they are pages, and their scales [entries, Hk, rows]."""

    def __init__(
        self,
        p: Program,
        a: Arguments,
        cache: Sequence[Buffer],
        scales: Sequence[Buffer | None],
        entries: int,
        capacity: int,
        is_packed: bool = False,
    ) -> None:
        self.p, self.a = p, a
        self.entries, self.capacity, self.is_packed = entries, capacity, is_packed
        # bits of a page's rows, pages of a sequence, and pages there are
        self.paging = (0, 0, 0)
        shape: Sequence[int] = a.q.shape
        self.batch, self.heads, self.queries, self.size = shape
        self.stored = cache[0].dtype
        self.key_heads, self.value_size = cache[1].shape[1], cache[1].shape[3]
        self.group = self.heads // max(1, self.key_heads)
        self.dtype = a.q.dtype
        self.is_far = are_far(a.q, *cache)
        self.tensors = [self._rows(x) for x in (a.q, *cache)]
        self.has_scales = any(s is not None for s in scales)
        self.tensors += [self._scales(s) for s in scales]

    def _rows(self, x: Buffer) -> Rows:
        """Rows without gaps, at any strides."""
        x = x if x.stride[-1] == 1 or x.shape[-1] == 1 else self.p.dense(x)
        return Rows(x.memory(), x.stride[:3])

    def _scales(self, x: Buffer | None) -> Rows:
        if x is None:
            one = self.p.new((1,))
            return Rows(self.p.fill(one, 1.0) if self.has_scales else one, (0, 0, 0))
        x = x if x.dtype == torch.float32 else self.p.dense(x, torch.float32)
        return Rows(x.memory(), x.stride)

    def run(
        self,
        file: str,
        function: str,
        flags: Sequence[bool],
        places: Sequence[Buffer],
        merge: tuple[tuple[bool, ...], Buffer, Buffer],
    ) -> Any:
        """Results and lse. `places` are the buffers of the kernel that tell where keys are; `merge`
        the flags and the buffers by which the second phase knows the same."""
        p, a = self.p, self.a
        out = p.new((self.batch, self.queries, self.heads, self.value_size), self.dtype)
        lse = p.new((self.batch, self.heads, self.queries))
        results = (out.transpose(1, 2), lse)
        if lse.numel == 0:
            return results
        shape = self._shape()
        if shape is None or self.is_far or lse.numel * self.value_size >= 2**31:
            return NotImplemented
        tiles = self._tiles(shape.rows)
        part, parts = self._parts(tiles * self.key_heads, shape)
        is_whole = parts == 1
        rows = lse.numel
        nothing = p.new((1,))
        partial = nothing if is_whole else p.new((parts, rows, self.value_size))
        sums = nothing if is_whole else p.new((parts, rows, 2))
        per_head = [
            nothing if x is None else p.dense(x, torch.float32) for x in (a.alibi_slopes, a.sinks)
        ]
        inputs = (*(x.memory for x in self.tensors), *places, *per_head)
        sizes, strides = self._sizes(part), self._strides()
        cap = 1.0 if a.softcap is None else float(a.softcap)
        args = (*inputs, out, lse, partial, sums, sizes, strides, a.scale, cap)
        has = [x is not None for x in (a.left, a.softcap, a.alibi_slopes, a.sinks)]
        types = (MSL_TYPE[self.dtype], STORED[self.stored])
        measures = (shape.head, shape.values, shape.width, shape.simdgroups, shape.columns)
        group = SIMD_WIDTH * shape.simdgroups
        grid = (parts * group, self.key_heads, tiles)
        variant: tuple[str | int, ...] = (
            *types,
            *measures,
            *flags,
            *has,
            self.has_scales,
            is_whole,
        )
        p.launch(file, function, variant, args, grid, (group, 1, 1))
        if not is_whole:
            known, lengths, starts = merge
            simdgroups = p.policy["merge_simdgroups"]
            per = -(-shape.values // SIMD_WIDTH)
            variant = (types[0], per, simdgroups, *known, a.left is not None, a.sinks is not None)
            merged = (partial, sums, lengths, starts, per_head[1], out, lse, sizes, strides)
            threads = round_up(rows * SIMD_WIDTH, SIMD_WIDTH * simdgroups)
            p.launch(MERGE, "attention_merge", variant, merged, threads, SIMD_WIDTH * simdgroups)
        return results

    def _shape(self) -> Shape | None:
        """As many simdgroups as there are rows for, of those that fit."""
        head, values = (round_up(max(n, 1), TILE) for n in (self.size, self.value_size))
        width = max(head, values)
        rows = self.group * -(-self.queries * self.batch // max(1, self.entries))
        rows = min(rows, most_rows(width))
        simdgroups = next(n for n in (1, 2, 4) if n * TILE >= rows)
        columns = 32 if width <= 64 else 16 if width <= 128 else 8
        used = (TILE * simdgroups * head + columns * width) * self.dtype.itemsize
        used += 12 * columns + 4 * simdgroups
        if values > MOST_VALUES or used > MAX_THREADGROUP_BYTES:
            return None
        return Shape(head, values, simdgroups, columns)

    def _tiles(self, rows: int) -> int:
        """Enough for packed sequences of any lengths, each with a last tile of its own."""
        if self.is_packed:
            return -(-self.queries * self.group // rows) + self.entries
        return self.batch * -(-self.queries * self.group // rows)

    def _parts(self, groups: int, shape: Shape) -> tuple[int, int]:
        """The keys of a part and the number of parts: so many that all cores find work, unless
        results of parts, written and read again, were more than a sixteenth of what a part reads.
        """
        rows = min(shape.rows, self.group * self.queries)
        of_part = 2 * 4 * rows * (self.value_size + 2)
        of_key = (self.size + self.value_size) * self.stored.itemsize
        least = max(self.p.policy["least_part"], 16 * of_part // max(1, of_key))
        wanted = self.p.policy["simdgroups_per_core"] * self.p.policy["gpu_cores"]
        parts = wanted // max(1, groups * shape.simdgroups)
        parts = max(1, min(parts, self.capacity // least))
        part = round_up(max(1, -(-self.capacity // parts)), shape.columns)
        return part, max(1, -(-self.capacity // part))

    def _sizes(self, part: int) -> tuple[int, ...]:
        left = min(self.a.left or 0, 1 << 30)
        return (
            *(self.heads, self.group, self.queries, self.capacity, self.size, self.value_size),
            *(left, self.entries, part, *self.paging, self.batch * self.queries * self.heads),
        )

    def _strides(self) -> tuple[int, ...]:
        slopes = self.a.alibi_slopes
        slope = slopes.shape[-1] if slopes is not None and len(slopes.shape) == 2 else 0
        return *(step for x in self.tensors for step in x.steps), slope


def integers(p: Program, x: Buffer | None) -> Buffer:
    """As kernels read them; what is absent is not read."""
    return p.new((1,), torch.int32) if x is None else p.dense(x, torch.int32)
