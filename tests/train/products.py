# SPDX-License-Identifier: MIT
"""Which way half precision products go, whatever the machine."""

import pytest

from metalcore.ops.train import _products


def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_products, "_multiplies_fast", lambda dtype: True)


def in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, in several blocks even of few numbers."""
    monkeypatch.setattr(_products, "_multiplies_fast", lambda dtype: False)
    for name, value in (("_HELD", (1, 1)), ("_LEAST", (3, 4))):
        monkeypatch.setattr(_products, name, value)
