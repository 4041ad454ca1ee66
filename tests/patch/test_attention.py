# SPDX-License-Identifier: MIT
"""Attention of accelerated models: masks as facts, caches, soft caps, sinks, what is torch's."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import masking_utils as hf

import metalcore
from metalcore._accuracy import error
from metalcore.patch import attention, attention_function
from metalcore.patch.attention_masks import make_mask
from tests.patch.families import FAMILIES, LAYERS, LLAMA, Family, allowed, build, gradients, text

WINDOW = 4
_SLIDING = {"sliding_window": WINDOW}
_TYPES = {"layer_types": ["sliding_attention", "full_attention"]}


def family(name: str) -> Family:
    return next(f for f in FAMILIES if f.name == name)


def windowed(name: str) -> Any:
    """A model whose window is shorter than the text."""
    changes = {
        "Mistral": _SLIDING,
        "Gemma2": {**_SLIDING, **_TYPES},
        "Gemma3": {**_SLIDING, **_TYPES},
    }
    return build(family(name), **changes[name])


def gpt_oss(**changes: Any) -> Any:
    config = transformers.GptOssConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        rope_parameters={"rope_theta": 1e4, "rope_type": "default"},
        **{**_SLIDING, **_TYPES, **changes},
    )
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.1 * torch.randn_like(p))
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "Llama": build,
    "Mistral": lambda: windowed("Mistral"),
    "Gemma2": lambda: windowed("Gemma2"),
    "Gemma3": lambda: windowed("Gemma3"),
    "GptOss": gpt_oss,
}


def padded(side: str) -> tuple[Tensor, Tensor]:
    """Tokens, and a mask that hides some of the first or last of each."""
    tokens = text()
    mask = torch.ones_like(tokens)
    hidden = slice(0, 3) if side == "left" else slice(-3, None)
    mask[0, hidden] = 0
    return tokens, mask


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The dimensions of the masks that our attention gets; 0 for none."""
    seen: list[int] = []
    original = attention_function.attend

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **named: Any) -> Any:
        seen.append(0 if mask is None else mask.dim())
        return original(module, q, k, v, mask, **named)

    attention._register()
    known = transformers.AttentionInterface._global_mapping
    monkeypatch.setitem(known, attention.NAME, attend)
    return seen


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_windows_are_no_masks_of_scores(name: str, side: str, masks: list[int]) -> None:
    model = MODELS[name]()
    tokens, mask = padded(side)
    # what padding would predict is nobody's business: its attention is not defined
    labels = tokens.masked_fill(mask.roll(1, -1) * mask == 0, -100)
    real = mask.bool()
    plain = model(tokens, attention_mask=mask, labels=labels)
    plain.loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with metalcore.accelerate(model), metalcore.trace() as t:
        found = model(tokens, attention_mask=mask, labels=labels)
        found.loss.backward()
        assert error(found.logits[real], plain.logits[real]) <= allowed()
    assert masks == [2] * LAYERS
    assert t.paths["attention"] == t.paths["attention_backward"]
    for n, p in model.named_parameters():
        if n in grads:
            assert error(p.grad, grads[n]) <= allowed(), n


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cache", [None, "static"])
def test_text_longer_than_the_window(name: str, cache: str | None, masks: list[int]) -> None:
    model = MODELS[name]()
    tokens, mask = padded("left")
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    if cache:
        settings["cache_implementation"] = cache
    written = model.generate(tokens, attention_mask=mask, **settings)
    alone = model.generate(tokens[1:], **settings)
    with metalcore.accelerate(model), metalcore.trace() as t:
        assert torch.equal(model.generate(tokens, attention_mask=mask, **settings), written)
        assert torch.equal(model.generate(tokens[1:], **settings), alone)
    if cache is None:
        assert 4 not in masks
        assert t.paths["attention_decode"]


def test_a_prompt_in_parts() -> None:
    model, tokens = windowed("Mistral"), text()
    with torch.no_grad():
        plain = model(tokens).logits
        with metalcore.accelerate(model):
            first = model(tokens[:, :6], use_cache=True)
            parts = [first.logits]
            for part in (tokens[:, 6:15], tokens[:, 15:]):
                out = model(part, past_key_values=first.past_key_values)
                parts.append(out.logits)
    assert error(torch.cat(parts, 1), plain) <= allowed()


def test_sequences_in_one_row_and_masks_of_the_user() -> None:
    model, tokens = build(), text()
    positions = torch.cat([torch.arange(7), torch.arange(9)]).expand(2, -1)
    own = (torch.rand(2, 1, 16, 16) < 0.6) | torch.eye(16, dtype=torch.bool)
    added = torch.zeros(own.shape).masked_fill(~own, torch.finfo(torch.float32).min)
    cases: list[dict[str, Any]] = [
        {"position_ids": positions},
        {"attention_mask": own},
        {"attention_mask": added},
    ]
    with torch.no_grad():
        plain = [model(tokens, **case).logits for case in cases]
        with metalcore.accelerate(model), metalcore.trace() as t:
            for case, truth in zip(cases, plain, strict=True):
                assert error(model(tokens, **case).logits, truth) <= allowed()
    assert Counter(r.op for r in t.records)["attention"] == 3 * LAYERS


def test_the_name_is_set_and_restored() -> None:
    model, other, tokens = build(), build(), text()
    plain = model(tokens).logits
    with metalcore.accelerate(model, attention=False) as summary:
        assert not summary.count("attention")
        assert model.config._attn_implementation == "sdpa"
    first = metalcore.accelerate(model)
    assert model.config._attn_implementation == attention.NAME
    assert other.config._attn_implementation == "sdpa"
    second = metalcore.accelerate(model)
    assert [r.left_alone for r in second.rows if r.layer == "attention"] == [
        "it is accelerated already"
    ]
    second.undo()
    assert model.config._attn_implementation == attention.NAME
    first.undo()
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(tokens).logits, plain)
    summary = metalcore.accelerate(model)
    model.set_attn_implementation("eager")
    summary.undo()
    assert model.config._attn_implementation == "eager"


def test_what_computes_something_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gemma2 import modeling_gemma2

    model = build(family("Gemma2"))
    original = modeling_gemma2.eager_attention_forward

    def doubled(*args: Any, scaling: float, softcap: float | None = None, **named: Any) -> Any:
        return original(*args, scaling=2 * scaling, softcap=softcap, **named)

    monkeypatch.setattr(modeling_gemma2, "eager_attention_forward", doubled)
    (row,) = [r for r in metalcore.accelerate(model).rows if r.layer == "attention"]
    assert row.left_alone == "its attention computes something else"
    assert model.config._attn_implementation == "eager"
    llama = build()
    llama.set_attn_implementation("flex_attention")
    (row,) = [r for r in metalcore.accelerate(llama).rows if r.layer == "attention"]
    assert row.left_alone == "its config asks for 'flex_attention'"


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss"])
def test_dropout_is_torchs(name: str) -> None:
    model = gpt_oss() if name == "GptOss" else build(family(name))
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.4
    tokens = text()
    model.train()
    torch.manual_seed(3)
    plain, grads = gradients(model, tokens)
    with metalcore.accelerate(model), metalcore.trace() as t:
        torch.manual_seed(3)
        found, ours = gradients(model, tokens)
    assert t.paths["attention"] == {"torch"}
    assert error(found.loss, plain.loss) <= allowed()
    for n, grad in grads.items():
        assert error(ours[n], grad) <= allowed(), n


def test_weights_where_they_are_wanted() -> None:
    model, tokens = windowed("Gemma2"), text()
    plain = model(tokens, output_attentions=True)
    with metalcore.accelerate(model):
        found = model(tokens, output_attentions=True)
    assert error(found.logits, plain.logits) <= allowed()
    for ours, theirs in zip(found.attentions, plain.attentions, strict=True):
        assert error(ours, theirs) <= allowed()


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_half_precision_and_autocast(name: str) -> None:
    model, tokens = build(LLAMA if name == "Llama" else family(name)), text()
    plain = model(tokens).logits
    with metalcore.accelerate(model):
        with torch.autocast("cpu", torch.bfloat16):
            mixed = model(tokens).logits
        model.bfloat16()
        half = model(tokens).logits
    for found in (mixed, half):
        assert error(found, plain) <= allowed(torch.bfloat16)


def test_compiled_with_padding() -> None:
    model = build(num_hidden_layers=1)
    tokens, mask = padded("left")
    with torch.no_grad():
        plain = model(tokens, attention_mask=mask).logits
        with metalcore.accelerate(model):
            torch._dynamo.reset()
            compiled = torch.compile(model, fullgraph=True, backend="eager")
            found = compiled(tokens, attention_mask=mask).logits
    torch._dynamo.reset()
    assert error(found[mask.bool()], plain[mask.bool()]) <= allowed()


def test_a_mask_is_compiled_alone() -> None:
    """As it is where the compiler gave up on what is around it."""
    packed = hf.packed_sequence_mask_function(torch.zeros(1, 6))
    both = hf.and_masks(hf.causal_mask_function, packed)
    torch._dynamo.reset()
    compiled = torch.compile(make_mask, backend="eager")
    found = compiled(1, 6, 6, mask_function=both, allow_is_causal_skip=False)
    torch._dynamo.reset()
    assert found is not None
    assert torch.equal(found[0, 0], torch.ones(6, 6, dtype=bool).tril())
