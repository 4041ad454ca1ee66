# SPDX-License-Identifier: MIT
"""Overrides that take every size, so that small tensors reach our kernels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import metalcore
from metalcore._route import Route
from metalcore.patch import _replace
from metalcore.patch.overrides import GROUPS

PLACES = [place for group in GROUPS for place in _replace.PLACES[group]]
SOFTMAX = torch.softmax


def found() -> list[Any]:
    """What user code finds at all places."""
    return [getattr(p._owner, p._attribute) for p in PLACES]


ORIGINALS = found()


def take_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for route in Route.all.values():
        monkeypatch.setattr(route, "_forced", False)


def ops_of(function: Callable[[], Any]) -> set[str]:
    """The metalcore ops that a call comes to."""
    with metalcore.trace() as t:
        function()
    return {r.op for r in t.records if r.path != "torch"}
