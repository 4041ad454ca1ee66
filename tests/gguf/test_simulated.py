# SPDX-License-Identifier: MIT
"""A packed model writes the same through its Metal kernels, in the simulator."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import metalcore
from metalcore.gguf.load import load_gguf
from metalcore.gguf.save import save_gguf
from metalcore.ops.quant._ggml import FORMATS
from metalcore.patch.quantize import quantize_model
from tests.gguf import tiny


def written(model: Any) -> list[int]:
    ids = tiny.tokenizer()("6+5=", return_tensors="pt").input_ids
    with torch.no_grad():
        found: list[int] = model.generate(ids, max_new_tokens=3, do_sample=False)[0].tolist()
    return found


def expect_equal_tokens(model: Any, op: str) -> None:
    with metalcore.accelerate(model):
        truth = written(model)
        with metalcore.simulate(), metalcore.trace() as t:
            found = written(model)
    assert found == truth
    assert tiny.tokenizer().decode(found) == "6+5=11<end>"
    assert all(path.startswith("sim:") for paths in t.paths.values() for path in paths)
    assert t.paths[op]


@pytest.mark.parametrize("scheme", FORMATS)
def test_tokens_of_a_file_are_equal(scheme: str, tmp_path: Path) -> None:
    save_gguf(tiny.trained(), tmp_path / "a.gguf", {".*": scheme}, tokenizer=tiny.tokenizer())
    expect_equal_tokens(load_gguf(tmp_path / "a.gguf"), "matmul_ggml")


@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_tokens_of_groups_are_equal(scheme: str) -> None:
    model = copy.deepcopy(tiny.trained())
    quantize_model(model, scheme)
    expect_equal_tokens(model, f"matmul_{scheme}")
