# SPDX-License-Identifier: MIT
"""Sums and products of arrays with less error, or none: `metalcore.precise` for MLX."""

from typing import Any

from metalcore.mlx import _table


def __getattr__(name: str) -> Any:
    if name not in _table.PRECISE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    found = globals()[name] = _table.made(name, _table.PRECISE)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_table.PRECISE})
