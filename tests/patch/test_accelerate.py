# SPDX-License-Identifier: MIT
"""Every family: same logits, gradients and text, metalcore in every layer, and all of it undone."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import metalcore
from metalcore._accuracy import error
from metalcore.patch.logits import LazyLogits
from tests.patch.families import FAMILIES, LAYERS, Family, allowed, build, gradients, text


def same_text(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    prompt = tokens[:, :5]
    found: torch.Tensor = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False
    )
    return found


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_a_family_computes_the_same_with_metalcore(family: Family) -> None:
    model, tokens = build(family), text()
    classes = {name: type(m) for name, m in model.named_modules()}
    weights = dict(model.state_dict(keep_vars=True))
    out, grads = gradients(model, tokens)
    written = same_text(model, tokens)

    summary = metalcore.accelerate(model)
    assert not [r for r in summary.rows if r.left_alone], summary
    with metalcore.trace() as t:
        found, found_grads = gradients(model, tokens)
    calls = Counter(r.op for r in t.records)
    assert calls["rope"] == 2 * LAYERS  # forward and backward
    assert calls["attention"] == calls["attention_backward"] == LAYERS
    assert {op: calls[op] for op in family.ops if op != "rope"} == {
        op: n for op, n in family.ops.items() if op != "rope"
    }, t

    assert error(found.loss, out.loss) <= allowed()
    assert isinstance(found.logits, LazyLogits)
    assert error(found.logits, out.logits) <= allowed()
    assert found_grads.keys() == grads.keys()
    for name, grad in grads.items():
        assert error(found_grads[name], grad) <= allowed(), name
    with metalcore.trace() as t:
        assert torch.equal(same_text(model, tokens), written)
    assert Counter(r.op for r in t.records)["attention_decode"] == 4 * LAYERS
    now = model.state_dict(keep_vars=True)
    assert list(now) == list(weights)
    assert all(now[name] is weights[name] for name in weights)

    summary.undo()
    assert {name: type(m) for name, m in model.named_modules()} == classes
    again, again_grads = gradients(model, tokens)
    assert type(again.logits) is torch.Tensor
    assert torch.equal(again.loss, out.loss)
    assert torch.equal(again.logits, out.logits)
    assert all(torch.equal(again_grads[n], g) for n, g in grads.items())


def test_the_summary_says_what_was_done_and_what_was_left_alone() -> None:
    model = build(num_hidden_layers=1)
    model.model.norm.forward = model.model.norm.forward
    with metalcore.accelerate(model, rope=False) as summary:
        lines = str(summary).splitlines()
        for words in (
            ("norm", "LlamaRMSNorm", "2", "rms_norm"),
            ("norm", "LlamaRMSNorm", "1", "its forward was replaced already"),
            ("attention", "LlamaAttention", "1", "attention"),
            ("mlp", "LlamaMLP", "1", "swiglu"),
            ("loss", "LlamaForCausalLM", "1", "linear_cross_entropy"),
        ):
            assert any(all(w in line for w in words) for line in lines), (words, summary)
        assert (summary.count("norm"), summary.count("rope"), summary.count("mlp")) == (2, 0, 1)
    assert type(model.model.layers[0].mlp).__name__ == "LlamaMLP"
    assert not isinstance(model.model.layers[0].mlp, metalcore.patch.swap.Swapped)


def test_the_summary_says_what_was_not_examined() -> None:
    model = build()
    with metalcore.accelerate(model, rope=False, attention=False) as summary:
        others = {"Embedding": 1, "LlamaAttention": LAYERS, "LlamaRotaryEmbedding": 1}
        assert summary.not_examined == others
        words = " ".join(str(summary).split())
        told = "Not examined, 4 modules of 3 classes that no part asked for would replace"
        assert told in words
    with metalcore.accelerate(model) as summary:
        assert summary.not_examined == {"Embedding": 1, "LlamaRotaryEmbedding": 1}


def test_what_metalcore_does_not_know_is_untouched() -> None:
    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.randn(8)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.eps)

    model = nn.Sequential(nn.Linear(8, 8), Strange())
    summary = metalcore.accelerate(model)
    assert [(r.cls, r.by) for r in summary.rows] == [("Strange", "")]
    assert "neither an RMSNorm nor a LayerNorm" in str(summary)
    assert [type(m) for m in model] == [nn.Linear, Strange]
    assert "no layer that metalcore could compute" in str(metalcore.accelerate(nn.Linear(2, 2)))


def test_experts_whose_product_is_out_of_reach_are_left_alone() -> None:
    family = next(f for f in FAMILIES if f.name == "Mixtral")
    model = build(family)
    model.set_experts_implementation("eager")
    with metalcore.accelerate(model) as summary:
        (row,) = [r for r in summary.rows if r.left_alone]
        assert (row.cls, row.count) == ("MixtralExperts", LAYERS)
        assert "experts_implementation='eager'" in row.left_alone


def test_each_summary_undoes_what_it_did_and_no_more() -> None:
    model, other, tokens = build(), build(), text()
    plain, _ = gradients(model, tokens)
    first = metalcore.accelerate(model, mlp=False)
    second = metalcore.accelerate(model)
    assert {r.layer for r in second.rows if r.by} == {"mlp"}
    assert {r.left_alone for r in second.rows if not r.by} == {"it is accelerated already"}
    third = metalcore.accelerate(other)
    second.undo()
    second.undo()
    assert not isinstance(model.model.layers[0].mlp, metalcore.patch.swap.Swapped)
    assert isinstance(model.model.norm, metalcore.patch.swap.Swapped)
    first.undo()
    with metalcore.trace() as t:
        assert torch.equal(gradients(model, tokens)[0].logits, plain.logits)
    assert not t.records
    third.undo()
    assert not isinstance(other.model.norm, metalcore.patch.swap.Swapped)


def test_another_model_of_the_family_stays_plain() -> None:
    model, other, tokens = build(), build(), text()
    plain, _ = gradients(other, tokens)
    metalcore.accelerate(model)
    with metalcore.trace() as t:
        assert torch.equal(gradients(other, tokens)[0].logits, plain.logits)
    assert not t.records


def test_parts_can_be_chosen() -> None:
    model, tokens = build(), text()
    assert metalcore.patch_transformers_rmsnorm(model) == 5
    assert metalcore.patch_transformers_rope(model) == 2
    with metalcore.trace() as t:
        model(tokens, labels=tokens)
    assert Counter(r.op for r in t.records) == {"rms_norm": 5, "rope": 2}
    others = {"rms_norm": False, "rope": False, "attention": False, "loss": False}
    with metalcore.accelerate(model, **others) as summary:
        assert {r.layer for r in summary.rows} == {"mlp"}
