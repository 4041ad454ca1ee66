# SPDX-License-Identifier: MIT
"""Rows of a decoder: sequences that come, grow each by its own tokens, and go."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from metalcore._check import expect
from metalcore.patch.decode_cache import DecoderCache, Store


class Stepper(Protocol):
    """What rows need of a decoder."""

    @property
    def is_recorded(self) -> bool: ...

    def make_store(self) -> Store | None: ...

    def forward(self, tokens: Tensor, cache: Any) -> Tensor: ...

    def step(self, store: Store, tokens: Tensor, rows: Tensor, slots: Tensor) -> Tensor: ...


@dataclass
class _Row:
    cache: Any
    left: list[int]
    logits: Tensor | None = None


class Rows:
    """Sequences that share the memory of one cache, each with a length of its own.

    Made by `metalcore.decoder(model).rows(capacity)`. One thread at a time may use it.

    Example:
        >>> rows = metalcore.decoder(model).rows(8)
        >>> row = rows.add(prompt)
        >>> token = int(rows.logits(row).argmax())
        >>> logits = rows.step({row: token})[row]
        >>> rows.free(row)
    """

    def __init__(self, decoder: Stepper, capacity: int, tokens: int) -> None:
        expect(capacity >= 1, "rows", f"capacity must be positive, got {capacity}")
        self.capacity = capacity
        self._decoder = decoder
        self._rows: dict[int, _Row] = {}
        self._store = decoder.make_store()
        if self._store is not None:
            self._store.reserve(capacity, max(1, tokens), 0)

    @property
    def active(self) -> tuple[int, ...]:
        """The rows in use, ascending."""
        return tuple(sorted(self._rows))

    @property
    def count_free(self) -> int:
        """How many rows are free."""
        return self.capacity - len(self._rows)

    @property
    def nbytes(self) -> int:
        """The memory of keys and values, used or not; 0 where transformers keeps them."""
        return 0 if self._store is None else self._store.nbytes

    def length(self, row: int) -> int:
        """How many tokens a row holds."""
        return int(self._rows[row].cache.get_seq_length())

    def logits(self, row: int) -> Tensor:
        """Of the token after what the row holds, float32 [vocabulary]."""
        found = self._rows[row].logits
        expect(found is not None, "rows", f"row {row} has tokens of its prompt left: advance it")
        assert found is not None
        return found

    def add(self, prompt: Sequence[int] | Tensor, *, chunk: int | None = None) -> int:
        """A row of a new sequence, whose tokens are run at once, or `chunk` of them at a time."""
        row = self.begin(prompt)
        try:
            while not self.advance(row, chunk or len(self._rows[row].left)):
                pass
        except BaseException:
            self.free(row)
            raise
        return row

    def begin(self, prompt: Sequence[int] | Tensor) -> int:
        """A row of a new sequence, of which nothing is run yet."""
        tokens = prompt.flatten().tolist() if isinstance(prompt, Tensor) else list(prompt)
        expect(bool(tokens), "rows", "a prompt must have tokens")
        row = next((r for r in range(self.capacity) if r not in self._rows), None)
        if row is None:
            raise RuntimeError(f"rows: all {self.capacity} rows are in use; free one first")
        if self._store is None:
            from transformers import DynamicCache

            cache: Any = DynamicCache()
        else:
            cache = DecoderCache(self._store, row)
        self._rows[row] = _Row(cache, tokens)
        return row

    def advance(self, row: int, n: int) -> bool:
        """Run the next tokens of a prompt; whether it is done."""
        found = self._rows[row]
        expect(n >= 1, "rows", f"there must be a token to run, got {n}")
        now, found.left = found.left[:n], found.left[n:]
        if now:
            logits = self._decoder.forward(torch.tensor([now]), found.cache)[0]
            found.logits = None if found.left else logits
        return not found.left

    def step(self, tokens: Mapping[int, int]) -> dict[int, Tensor]:
        """One token for each of some rows, in one step; the logits of what follows."""
        rows = list(tokens)
        if not rows:
            return {}
        found = [self._rows[row] for row in rows]
        for row, one in zip(rows, found, strict=True):
            expect(not one.left, "rows", f"row {row} has tokens of its prompt left: advance it")
        ids = torch.tensor([int(tokens[row]) for row in rows])
        if self._store is None or not self._decoder.is_recorded:
            logits = torch.cat(
                [
                    self._decoder.forward(ids[i : i + 1, None], one.cache)
                    for i, one in enumerate(found)
                ]
            )
        else:
            lengths = [one.cache.length for one in found]
            if max(lengths) >= self._store.slots:
                self._store.reserve(self.capacity, max(lengths) + 1, max(lengths))
            places = torch.tensor(rows), torch.tensor(lengths)
            logits = self._decoder.step(self._store, ids, *places)
            for one in found:
                one.cache.length += 1
        for one, made in zip(found, logits, strict=True):
            one.logits = made
        return dict(zip(rows, logits, strict=True))

    def free(self, row: int) -> None:
        """Give a row back; its memory is used again."""
        del self._rows[row]
