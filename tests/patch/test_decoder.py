# SPDX-License-Identifier: MIT
"""`decoder(model)`: transformers' generate() gives the same tokens, each by one decode_step."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import metalcore
from metalcore._accuracy import error, tolerance
from metalcore.patch import decode_parts
from metalcore.patch.decode_cache import DecoderCache
from metalcore.patch.decode_record import record
from tests.patch.families import FAMILIES, Family, build

WINDOWED = {"sliding_window": 6}
LOCAL = {
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
CHANGES: dict[str, dict[str, Any]] = {
    "Llama": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "Mistral": WINDOWED,
    "Gemma2": WINDOWED,
    "Gemma3": {**WINDOWED, **LOCAL},
    "Granite": {"residual_multiplier": 0.3, "embedding_multiplier": 2.5, "logits_scaling": 4.0},
    "SmolLM3": {"no_rope_layers": [1, 0]},
}
REFUSED = {
    "Mixtral": "feed-forward",
    "Qwen2Moe": "feed-forward",
    "Cohere": "final norm",
    "GPTNeoX": "final norm",
}
TAKEN = [f for f in FAMILIES if f.name not in REFUSED]
ONLY_DECODE = {
    **dict.fromkeys(("rms_norm", "layer_norm", "rope", "attention", "mlp", "loss"), False),
    "decode": True,
}


def made(family: Family | str = "Llama", **changes: Any) -> Any:
    if isinstance(family, str):
        family = next(f for f in FAMILIES if f.name == family)
    own = {"max_position_embeddings": 512, "eos_token_id": None}
    model = build(family, **{**own, **CHANGES.get(family.name, {}), **changes}).eval()
    model.generation_config.eos_token_id = None
    return model


def prompt(entries: int = 1) -> Tensor:
    return torch.randint(3, 128, (entries, 9), generator=torch.Generator().manual_seed(1))


def generate(model: Any, tokens: Tensor, new: int, **how: Any) -> Tensor:
    torch.manual_seed(7)
    with torch.no_grad():
        found: Tensor = model.generate(tokens, max_new_tokens=new, **{"do_sample": False, **how})
    return found


def steps(seen: Any) -> int:
    return sum(r.op == "decode_step" for r in seen.records)


SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}


@pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", TAKEN, ids=lambda f: f.name)
def test_tokens_are_those_of_transformers(family: Family, how: dict[str, Any]) -> None:
    model, tokens = made(family), prompt()
    truth = generate(model, tokens, 200, **how)
    with metalcore.decoder(model) as d, metalcore.trace() as seen:
        assert d.is_recorded, d.why_not
        found = generate(model, tokens, 200, past_key_values=d.cache(), **how)
    assert torch.equal(found, truth)
    assert Counter(r.op for r in seen.records) == {"decode_step": 199}


def padded(model: Any) -> Callable[[], Tensor]:
    tokens = prompt(3)
    mask = torch.ones_like(tokens)
    mask[0, :4] = mask[2, :1] = 0
    return lambda: generate(model, tokens, 40, attention_mask=mask)


def beams(model: Any) -> Callable[[], Tensor]:
    return lambda: generate(model, prompt(2), 40, num_beams=4)


def assisted(model: Any) -> Callable[[], Tensor]:
    draft = made("Llama", num_hidden_layers=1)
    return lambda: generate(model, prompt(), 40, assistant_model=draft)


def looked_up(model: Any) -> Callable[[], Tensor]:
    return lambda: generate(model, prompt().repeat(1, 3), 40, prompt_lookup_num_tokens=3)


WAYS = {"padded": padded, "beams": beams, "assisted": assisted, "looked up": looked_up}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", TAKEN, ids=lambda f: f.name)
def test_ways_of_generation(family: Family, way: str) -> None:
    model = made(family)
    call = WAYS[way](model)
    truth = call()
    with metalcore.accelerate(model, **ONLY_DECODE) as summary, metalcore.trace() as seen:
        assert summary.count("decode") == 1, summary
        found = call()
    assert torch.equal(found, truth)
    # several tokens are one step where they are guessed before
    least = 39 if way in ("padded", "beams") else 6
    assert steps(seen) >= least


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_left_to_transformers_with_a_reason(name: str) -> None:
    model = made(name)
    with metalcore.decoder(model) as d, metalcore.trace() as seen:
        assert not d.is_recorded
        assert REFUSED[name] in d.why_not
        assert d.why_not in repr(d)
        found = generate(model, prompt(), 8, past_key_values=d.cache())
    assert torch.equal(found, generate(model, prompt(), 8))
    assert steps(seen) == 0
    row = metalcore.accelerate(model, **ONLY_DECODE).rows[-1]
    assert row.layer == "decode"
    assert not row.by
    assert REFUSED[name] in row.left_alone


def test_rope_that_changes_with_the_length_is_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    d = metalcore.decoder(made(rope_parameters=rope))
    assert "changes with the length" in d.why_not


def test_hooks_are_refused() -> None:
    model = made()
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert "hooks" in metalcore.decoder(model).why_not


@pytest.mark.parametrize("scheme", ["q4_0", "q4_K", "q8_0", "int4", "int8"])
def test_quantized_models(scheme: str) -> None:
    model = made(hidden_size=256, intermediate_size=512, num_attention_heads=8)
    metalcore.quantize_model(model, scheme, skip=())
    truth = generate(model, prompt(), 60)
    with metalcore.accelerate(model, decode=True) as summary, metalcore.trace() as seen:
        assert summary.count("decode") == 1, summary
        found = generate(model, prompt(), 60)
    assert torch.equal(found, truth)
    assert steps(seen) == 59


@pytest.mark.parametrize(
    ("name", "scheme", "kinds"), [("Llama", "", 1), ("Llama", "q8_0", 1), ("Gemma3", "", 2)]
)
def test_layers_that_are_alike_are_asked_once(
    name: str, scheme: str, kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = {"num_hidden_layers": 6}
    if name == "Gemma3":
        layers["layer_types"] = LOCAL["layer_types"] * 3
    model = made(name, **layers)
    if scheme:
        metalcore.quantize_model(model, scheme)
    asked: Counter[str] = Counter()

    def counted(part: str, ask: Any, *args: Any) -> Any:
        asked[part] += 1
        return ask(*args)

    for part in ("_heads", "_wiring"):
        ask = getattr(decode_parts, part)
        monkeypatch.setattr(decode_parts, part, partial(counted, part, ask))
    assert metalcore.decoder(model).is_recorded
    assert asked == {"_heads": kinds, "_wiring": kinds}


def test_activations_of_8_bits_are_proved_as_coarse_as_they_are() -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
    model = made(num_hidden_layers=8, **sizes)
    metalcore.quantize_model(model, "q4_0", skip=())
    assert record(model).rounds_to == torch.float32
    for module in model.modules():
        if isinstance(module, metalcore.GGMLLinear):
            module.activation = "int8"
    assert record(model).rounds_to == torch.bfloat16
    assert metalcore.decoder(model).is_recorded


def test_bfloat16_models_are_computed_in_float32_between_products() -> None:
    model = made().to(torch.bfloat16)
    with metalcore.decoder(model) as d:
        assert d.is_recorded, d.why_not
        cache = d.cache()
        assert generate(model, prompt(), 20, past_key_values=cache).shape == (1, 29)
        assert cache.store.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_keys_and_values_in_half(dtype: torch.dtype) -> None:
    model = made()
    with metalcore.decoder(model, dtype=dtype) as d:
        cache = d.cache()
        # two that are almost alike may change places
        with metalcore.trace() as seen:
            generate(model, prompt(), 20, past_key_values=cache)
    assert cache.store.dtype == dtype
    assert "decode_step" in seen.paths


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma3"])
def test_keys_and_values_in_8_bits(name: str, how: dict[str, Any]) -> None:
    model = made(name)
    truth = generate(model, prompt(2), 40, past_key_values=metalcore.QuantizedCache(), **how)
    with metalcore.decoder(model, dtype=torch.int8) as d, metalcore.trace() as seen:
        assert d.is_recorded, d.why_not
        cache = d.cache()
        found = generate(model, prompt(2), 40, past_key_values=cache, **how)
    assert torch.equal(found, truth)
    assert steps(seen) == 39
    store = cache.store
    assert store.dtype == torch.int8
    assert cache.nbytes == store.values.numel() + 4 * store.values[..., 0].numel()


@pytest.mark.parametrize("family", TAKEN, ids=lambda f: f.name)
def test_8_bits_are_as_close_as_their_rounding(family: Family) -> None:
    model, tokens = made(family), prompt().repeat(1, 5)
    logits = []
    for dtype in (torch.float32, torch.int8):
        with metalcore.decoder(model, dtype=dtype) as d, torch.no_grad():
            cache = d.cache()
            model(input_ids=tokens, past_key_values=cache)
            each = [model(input_ids=tokens[:, i : i + 1], past_key_values=cache) for i in range(9)]
            logits.append(torch.cat([one.logits for one in each], 1))
    # half a step of 127 of the largest value: the rounding of a bfloat16
    assert 0 < error(logits[1], logits[0]) <= tolerance("decode_step", torch.bfloat16, 1)


def test_rows_in_8_bits() -> None:
    model = made()
    rows = metalcore.decoder(model, dtype=torch.int8).rows(2, tokens=4)
    cache = metalcore.QuantizedCache()
    truth = generate(model, prompt(), 80, past_key_values=cache)[0, 9:].tolist()
    row, found = rows.add(prompt()), []
    while len(found) < 80:
        found.append(int(rows.logits(row).argmax()))
        rows.step({row: found[-1]})
    assert found == truth


def test_the_metal_program_gives_the_same_tokens() -> None:
    model = made("Qwen3", num_hidden_layers=1, hidden_size=16, intermediate_size=24, vocab_size=40)
    tokens = prompt() % 40
    truth = generate(model, tokens, 32)
    with metalcore.decoder(model) as d, metalcore.simulate(), metalcore.trace() as seen:
        found = generate(model, tokens, 32, past_key_values=d.cache())
    assert torch.equal(found, truth)
    steps_seen = [r for r in seen.records if r.op == "decode_step"]
    assert len(steps_seen) == 31
    assert {r.path.split(":")[0] for r in steps_seen} == {"sim"}


def test_undo_is_exact() -> None:
    model = made()
    kind, names = type(model), dict(vars(model))
    with metalcore.decoder(model) as d:
        assert type(model) is not kind
        assert isinstance(model, kind)
        with pytest.raises(ValueError, match="already"):
            d.__enter__()
    d.undo()
    assert type(model) is kind
    assert dict(vars(model)) == names
    summary = metalcore.accelerate(model, decode=True)
    summary.undo()
    assert type(model) is kind
    assert vars(model).keys() == names.keys()


def test_weights_that_change_are_recorded_again() -> None:
    model = made()
    with metalcore.decoder(model) as d:
        generate(model, prompt(), 4, past_key_values=d.cache())
        other = made(tie_word_embeddings=False)
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(1.1)
        model.load_state_dict(other.state_dict())
        with metalcore.trace() as seen:
            found = generate(model, prompt(), 30, past_key_values=d.cache())
        # five of them prove it again
        assert steps(seen) == 29 + 5
        # a layer that is no longer a plain product
        model.model.layers[0].mlp.up_proj = nn.Sequential(model.model.layers[0].mlp.up_proj)
        again = generate(model, prompt(), 30, past_key_values=d.cache())
        assert not d.is_recorded
    assert torch.equal(found, generate(other, prompt(), 30))
    assert torch.equal(found, again)


def test_calls_that_ask_for_more_are_the_models_own() -> None:
    model = made()
    with metalcore.decoder(model) as d, torch.no_grad():
        cache = d.cache()
        model(input_ids=prompt(), past_key_values=cache)
        with metalcore.trace() as seen:
            out = model(input_ids=prompt()[:, :1], past_key_values=cache, output_hidden_states=True)
            assert len(out.hidden_states) == 3
            assert steps(seen) == 0
            model(input_ids=prompt()[:, :1], past_key_values=cache)
            assert steps(seen) == 1
        assert cache.get_seq_length() == 11


def test_the_cache_crops_and_grows() -> None:
    model = made()
    with metalcore.decoder(model) as d, torch.no_grad():
        cache = d.cache()
        first = model(input_ids=prompt(), past_key_values=cache).logits[:, -1]
        for token in range(3, 103):
            model(input_ids=torch.tensor([[token]]), past_key_values=cache)
        assert isinstance(cache, DecoderCache)
        assert cache.get_seq_length() == 109
        cache.crop(-101)
        again = model(input_ids=prompt()[:, -1:], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(first, again)


def test_rows_come_grow_and_go() -> None:
    model = made()
    d = metalcore.decoder(model)
    rows = d.rows(2, tokens=4)
    prompts = [[5, 6, 7], [9] * 20, [11, 12]]
    truth = [generate(model, torch.tensor([p]), 12)[0, len(p) :].tolist() for p in prompts]
    found: dict[int, list[int]] = {}
    owner = {rows.add(prompts[0]): 0, rows.add(torch.tensor(prompts[1]), chunk=7): 1}
    with pytest.raises(RuntimeError, match="in use"):
        rows.add([1])
    with metalcore.trace() as seen:
        while owner:
            tokens = {row: int(rows.logits(row).argmax()) for row in owner}
            for row, token in tokens.items():
                found.setdefault(owner[row], []).append(token)
            for row in [row for row in owner if len(found[owner[row]]) == 12]:
                rows.free(row)
                done = owner.pop(row)
                del tokens[row]
                if done == 0:
                    owner[rows.add(prompts[2])] = 2
            rows.step(tokens)
            if len(found[0]) == 4 and rows.length(0) == 7:
                assert rows.active == (0, 1)
                assert rows.count_free == 0
    assert [found[i] for i in range(3)] == truth
    assert steps(seen) == 22
    assert rows.count_free == 2
    assert rows.nbytes > 0
    with pytest.raises(KeyError):
        rows.step({0: 1})


def test_rows_of_a_model_without_a_tape() -> None:
    model = made("Mixtral")
    rows = metalcore.decoder(model).rows(2)
    row = rows.add(prompt())
    found = []
    for _ in range(6):
        found.append(int(rows.logits(row).argmax()))
        rows.step({row: found[-1]})
    assert found == generate(model, prompt(), 6)[0, 9:].tolist()
