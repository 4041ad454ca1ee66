# SPDX-License-Identifier: MIT
"""Rows: texts of their own lengths that one model goes on with together."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from metalcore._check import expect
from metalcore.patch.attention import NAME
from metalcore.patch.row_cache import RowCache


class Rows(Protocol):
    """What the engine asks of a model; for one thread at a time."""

    @property
    def count_free(self) -> int:
        """How many rows are free."""

    def begin(self, prompt: Sequence[int]) -> int:
        """Take a row for a prompt, of which nothing is computed yet."""

    def advance(self, row: int, n: int) -> bool:
        """Compute up to `n` more tokens of its prompt; whether that was the last of it."""

    def logits(self, row: int) -> Tensor:
        """Of the token after all that the row has seen, float32 [vocabulary]."""

    def step(self, tokens: Mapping[int, int]) -> Mapping[int, Tensor]:
        """One token for each of some rows, in one go; the logits after it."""

    def free(self, row: int) -> None:
        """Give a row back."""


class ModelRows:
    """Rows through the forward of an accelerated model of transformers.

    Args:
        model: after `accelerate`, whose attention reads rows where they are.
        capacity: so many rows.
        dtype: of keys and values: None as the model computes, or torch.int8.
    """

    def __init__(self, model: Any, capacity: int, *, dtype: torch.dtype | None = None) -> None:
        how = model.config.get_text_config()._attn_implementation
        found = f"the model's attention must be metalcore's, got {how!r}"
        expect(how == NAME, "serve", found)
        self.model, self.capacity = model, capacity
        self.cache = RowCache(model.config, dtype=dtype)
        self._prompts: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._logits: dict[int, Tensor] = {}
        self._unused = list(range(capacity - 1, -1, -1))

    @property
    def count_free(self) -> int:
        return len(self._unused)

    def begin(self, prompt: Sequence[int]) -> int:
        expect(bool(self._unused), "serve", f"all {self.capacity} rows are taken")
        row = self._unused.pop()
        self._prompts[row], self._lengths[row] = list(prompt), 0
        return row

    def advance(self, row: int, n: int) -> bool:
        left = self._prompts[row]
        part, self._prompts[row] = left[:n], left[n:]
        self._logits[row] = self._forward([row], [part])[0]
        return not self._prompts[row]

    def logits(self, row: int) -> Tensor:
        return self._logits[row]

    def step(self, tokens: Mapping[int, int]) -> dict[int, Tensor]:
        rows = list(tokens)
        made = self._forward(rows, [[token] for token in tokens.values()])
        found = dict(zip(rows, made, strict=True))
        self._logits |= found
        return found

    def free(self, row: int) -> None:
        del self._prompts[row], self._lengths[row]
        self._logits.pop(row, None)
        self.cache.drop(row)
        self._unused.append(row)

    def _forward(self, rows: list[int], tokens: list[list[int]]) -> Tensor:
        """The logits after the last of `tokens` [rows, n], [rows, vocabulary]."""
        device, n = self.model.device, len(tokens[0])
        positions = [range(self._lengths[row], self._lengths[row] + n) for row in rows]
        self.cache.choose(rows, n, device)
        with torch.inference_mode():
            found = self.model(
                input_ids=torch.tensor(tokens, device=device),
                position_ids=torch.tensor([list(p) for p in positions], device=device),
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            )
        for row in rows:
            self._lengths[row] += n
        logits: Tensor = found.logits[:, -1].float()
        return logits
