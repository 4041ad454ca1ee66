# SPDX-License-Identifier: MIT
"""`quantize_model` in place and back; transformers' own way; adapters on top."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from metalcore._quantized_layers import GGMLEmbedding, GGMLLinear, Int4Linear
from metalcore.hf import MetalcoreConfig
from metalcore.patch.quantize import SCHEMES, quantize_model
from tests.gguf import tiny

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
LINEARS = 2 * 7


def layers(model: nn.Module, kind: type[nn.Module]) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, kind)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantized_model_still_solves_its_task(scheme: str) -> None:
    model = copy.deepcopy(tiny.trained())
    report = quantize_model(model, scheme)
    assert len(report.rows) == LINEARS
    assert report.after < 0.3 * report.before
    assert all(0 < row.error < 0.2 for row in report.rows)
    assert tiny.right(model, tiny.SUMS) == 1.0
    assert type(model.lm_head) is nn.Linear


def test_undo_gives_back_what_was_there() -> None:
    model = copy.deepcopy(tiny.trained())
    before = copy.deepcopy(model.state_dict())
    names = {n: {*vars(m)} for n, m in model.named_modules()}
    for scheme in ("int4", {"embed": "q8_0", ".*": "q4_K"}):
        report = quantize_model(model, scheme, keep=True)
        assert len(layers(model, Int4Linear)) + len(layers(model, GGMLLinear)) == LINEARS
        model(tiny.lines(tiny.SUMS[:2]))
        report.undo()
        report.undo()
        assert not layers(model, Int4Linear)
        assert not layers(model, GGMLEmbedding)
        after = model.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[k], after[k]) for k in before)
        assert {n: {*vars(m)} for n, m in model.named_modules()} == names


def test_undo_without_the_originals_gives_their_values() -> None:
    model = copy.deepcopy(tiny.trained())
    report = quantize_model(model, "q8_0")
    packed = model.model.layers[0].mlp.up_proj.dequantized()
    report.undo()
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, packed)
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear


def test_patterns_sizes_and_shared_weights_decide() -> None:
    model = nn.ModuleDict(
        {
            "odd": nn.Linear(33, 4),
            "small": nn.Linear(64, 4),
            "one": nn.Linear(256, 4),
            "two": nn.Linear(256, 4),
            "table": nn.Embedding(9, 64),
            "other": nn.Embedding(9, 64),
        }
    )
    model["two"].weight = model["one"].weight
    seen: list[tuple[str, int, int]] = []
    report = quantize_model(
        model,
        {"table": "q8_0", "other": "int4", ".*": "q4_K"},
        progress=lambda *step: seen.append(step),
    )
    rows = {row.name: row for row in report.rows}
    assert rows["odd"].why_not == "stays: rows of 33 are no multiple of 32"
    assert rows["small"].scheme == "q5_0"
    assert rows["two"].why_not == rows["one"].why_not == "stays: its weight is shared"
    assert isinstance(model["table"], GGMLEmbedding)
    assert rows["other"].why_not == "stays: no int4 for embeddings"
    assert seen[-1][1:] == (6, 6)
    assert "small" in str(report)
    assert "are" in str(report).splitlines()[-1]
    with pytest.raises(ValueError, match=r"got \['q4_k'\]"):
        quantize_model(model, "q4_k")


def test_a_bar_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    quantize_model(nn.Sequential(nn.Linear(32, 4)), "q4_0", progress=True)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("scheme", ["q4_K", "q8_0", "int4", "int8"])
def test_transformers_quantizes_saves_and_loads(scheme: str, tmp_path: Path) -> None:
    tiny.trained().save_pretrained(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=MetalcoreConfig(scheme)
    )
    expected = copy.deepcopy(tiny.trained())
    quantize_model(expected, scheme)
    ids = tiny.lines(tiny.SUMS[:5])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)
    model.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    with torch.no_grad():
        assert torch.equal(again(ids).logits, expected(ids).logits)
    size = (tmp_path / "packed/model.safetensors").stat().st_size
    assert size < 0.5 * (tmp_path / "plain/model.safetensors").stat().st_size


@pytest.mark.parametrize("scheme", ["q4_K", "int4"])
def test_adapters_on_packed_weights_learn_what_those_on_plain_ones_do(scheme: str) -> None:
    packed = copy.deepcopy(tiny.trained())
    quantize_model(packed, scheme)
    for layer in layers(packed, GGMLLinear) + layers(packed, Int4Linear):
        layer.activation = "float"
    plain = copy.deepcopy(packed)
    for layer in layers(plain, GGMLLinear) + layers(plain, Int4Linear):
        values = layer.dequantized()
        layer.__class__ = nn.Linear
        layer.weight = nn.Parameter(values, requires_grad=False)
    ids = tiny.lines(tiny.DIFFERENCES)
    losses = []
    for model in (packed, plain):
        torch.manual_seed(0)
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
        optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=3e-3)
        losses.append([])
        for _ in range(4):
            optimizer.zero_grad()
            loss = adapted(input_ids=ids, labels=tiny.labels(ids)).loss
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0][-1] < losses[0][0]
    assert torch.tensor(losses[0]).allclose(torch.tensor(losses[1]), rtol=1e-3)
