# SPDX-License-Identifier: MIT
"""Models are asked for what they write, whatever computes it."""

import sys

import pytest

from metalcore._lazy import FAMILIES


@pytest.fixture(autouse=True)
def _any_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METALCORE_STRICT", "0")


_NEED_OPS = ("checkpoints", "commands", "gguf_kernel", "layers", "models", "quantize")
# Ops of packed weights are no public family yet: loaded, they would be held to all that ops are.
if "quant" not in FAMILIES and not any("tests/gguf" in word for word in sys.argv):
    collect_ignore = [f"test_{name}.py" for name in _NEED_OPS]
