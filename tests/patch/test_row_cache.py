# SPDX-License-Identifier: MIT
"""Rows of their own lengths, which come and go, give what each of them alone gives."""

from typing import Any

import pytest
import torch
from torch import Tensor

import metalcore
from metalcore._accuracy import error
from metalcore.patch.row_cache import RowCache
from tests.patch.families import VOCABULARY, allowed, build
from tests.patch.test_attention import MODELS, windowed
from tests.patch.test_cache import ROUNDED


def alone(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(tokens[None]).logits[0]
    return found


class Rows:
    """Writes given texts to rows, and keeps the logits after each token that was asked for."""

    def __init__(self, model: Any, texts: list[Tensor], **how: Any) -> None:
        self.model, self.texts = model, texts
        self.cache = RowCache(model.config, page=4, **how)
        self.at = [0] * len(texts)
        self.found: list[dict[int, Tensor]] = [{} for _ in texts]

    def forward(self, rows: list[int], n: int) -> None:
        self.cache.choose(rows, n, torch.device("cpu"))
        places = torch.tensor([[self.at[r] + i for i in range(n)] for r in rows])
        tokens = torch.stack([self.texts[r][p] for r, p in zip(rows, places, strict=True)])
        with torch.no_grad():
            logits = self.model(
                input_ids=tokens, position_ids=places, past_key_values=self.cache
            ).logits
        for row, place, own in zip(rows, places, logits, strict=True):
            self.found[row] |= {int(p): y for p, y in zip(place, own, strict=True)}
            self.at[row] += n


def mixed(model: Any, **how: Any) -> Rows:
    """Three rows that begin at different times, one of them in pieces."""
    texts = [torch.randint(3, VOCABULARY, (n,)) for n in (19, 30, 12)]
    rows = Rows(model, texts, **how)
    rows.forward([0], 5)
    rows.forward([0], 1)
    rows.forward([1], 9)
    rows.forward([1, 0], 1)
    rows.forward([1], 6)
    rows.forward([2], 1)
    for _ in range(11):
        rows.forward([0, 2, 1], 1)
    return rows


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_what_they_are_alone(name: str) -> None:
    model = MODELS[name]()
    with metalcore.accelerate(model):
        with metalcore.trace() as t:
            rows = mixed(model)
        assert {r.op for r in t.records} >= {"paged_attention", "paged_write"}
        for text, found in zip(rows.texts, rows.found, strict=True):
            truth = alone(model, text[: len(found)])
            assert len(found) > 10
            assert error(torch.stack(list(found.values())), truth) <= allowed()


def test_rows_in_8_bits() -> None:
    model = build()
    with metalcore.accelerate(model):
        rows = mixed(model, dtype=torch.int8)
        truth = alone(model, rows.texts[0][: rows.at[0]])
        found = torch.stack(list(rows.found[0].values()))
        assert 0 < error(found, truth) <= 2 * ROUNDED


def test_a_row_that_is_dropped_gives_its_pages_back() -> None:
    model = build()
    with metalcore.accelerate(model):
        rows = mixed(model)
        pages = rows.cache.used_pages
        assert pages == sum(-(-n // 4) for n in rows.at)
        room = rows.cache.tables[None].count
        for _ in range(3):
            rows.cache.drop(1)
            rows.at[1] = 0
            rows.forward([1], 17)
        assert rows.cache.tables[None].count == room
        truth = alone(model, rows.texts[1][:17])
        found = torch.stack([rows.found[1][i] for i in range(17)])
        assert error(found, truth) <= allowed()
        for row in range(3):
            rows.cache.drop(row)
        assert rows.cache.used_pages == 0


def test_windows_keep_no_more_than_they_see() -> None:
    model = windowed("Gemma3")
    with metalcore.accelerate(model):
        rows = mixed(model)
    tables = {w: t for w, t in rows.cache.tables.items() if w is not None}
    assert tables
    for window, table in tables.items():
        assert table.used <= 3 * (-(-window // 4) + 2)


def test_other_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="metalcore's attention"):
        mixed(build())


def test_states_that_are_no_keys_are_refused() -> None:
    import transformers

    config = transformers.Qwen3NextConfig(
        hidden_size=32, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
    )
    with pytest.raises(ValueError, match="must keep keys and values"):
        RowCache(config)
