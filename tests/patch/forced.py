# SPDX-License-Identifier: MIT
"""What overrides replace, and which ops a call comes to."""

from collections.abc import Callable
from typing import Any

import torch

import metalcore
from metalcore.patch import _replace
from metalcore.patch.overrides import GROUPS

PLACES = [place for group in GROUPS for place in _replace.PLACES[group]]
SOFTMAX = torch.softmax


def found() -> list[Any]:
    """What user code finds at all places."""
    return [getattr(p._owner, p._attribute) for p in PLACES]


ORIGINALS = found()


def ops_of(function: Callable[[], Any]) -> set[str]:
    """The metalcore ops that a call comes to."""
    with metalcore.trace() as t:
        function()
    return {r.op for r in t.records if r.path != "torch"}
