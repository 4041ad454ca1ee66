# SPDX-License-Identifier: MIT
"""The example learns, by our kernels."""

import importlib.util
from pathlib import Path

import mlx.core as mx
import pytest

import metalcore

FILE = Path(__file__).parents[2] / "examples" / "mlx_finetune.py"


def test_the_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("mlx_finetune", FILE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    with metalcore.trace() as t:
        first, last = example.main(steps=15, size=4, length=24, dims=32)
    mx.set_default_device(before)
    assert last < 0.8 * first
    assert "5 x RMSNorm, 2 x Attention, 2 x RoPE" in capsys.readouterr().out
    # norms of few values are left to MLX
    assert t.paths["rms_norm"] == {"mlx"}
    for op in ("rope", "attention_backward", "cross_entropy_", "adamw_step", "swiglu"):
        assert all(path.startswith("cpu:") for path in t.paths[op]), (op, t.paths)
