# SPDX-License-Identifier: MIT
"""Caches in pages and in 8 bits: the same text, in less memory, with beams, padding and windows."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import metalcore
from metalcore._accuracy import error
from metalcore.patch.cache import PagedCache, QuantizedCache
from metalcore.patch.paged_layer import PagedLayer, PagedTensor
from tests.patch.families import LAYERS, allowed, build, text
from tests.patch.test_attention import MODELS, gpt_oss, padded, windowed

SETTINGS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
# what int8 of keys and values may change of a logit: half a step of 1/127 in each
ROUNDED = 1 / 127


def generations(model: Any, cache: Any = None) -> Iterator[Tensor]:
    """Text of padded prompts, of whole ones, and by beams; `cache` makes a new one for each."""
    torch.manual_seed(0)
    tokens, mask = padded("left")
    for how in ({"attention_mask": mask}, {}, {"attention_mask": mask, "num_beams": 3}):
        given = {} if cache is None else {"past_key_values": cache()}
        yield model.generate(tokens, **how, **given, **SETTINGS)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("accelerated", [True, False])
def test_text_is_the_same(name: str, accelerated: bool) -> None:
    model = MODELS[name]()
    truth = list(generations(model))
    summary = metalcore.accelerate(model) if accelerated else None
    with metalcore.trace() as t:
        found = list(generations(model, lambda: PagedCache(model.config, page=4, tokens=4)))
    assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))
    assert ("paged_attention" in t.paths) is accelerated
    assert "paged_write" in t.paths
    if summary:
        summary.undo()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_eight_bits_are_kept_and_stay(dtype: torch.dtype) -> None:
    model, tokens = build(), text()
    with torch.no_grad(), metalcore.accelerate(model):
        truth = model(tokens).logits
        cache = QuantizedCache(model.config, dtype=dtype)
        first = model(tokens[:, :10], past_key_values=cache).logits
        with metalcore.trace() as t:
            rest = [
                model(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(10, 16)
            ]
    assert error(first, truth[:, :10]) <= allowed()
    steps = 1 if dtype == torch.int8 else 8
    assert 0 < error(torch.cat(rest, 1), truth[:, 10:]) <= steps * ROUNDED
    assert "attention_decode" not in t.paths
    assert {layer.k.dtype for layer in cache.layers} == {dtype}
    plain = PagedCache(model.config)
    with torch.no_grad():
        model(tokens, past_key_values=plain)
    # scales are one float32 for each token and head of 8
    assert cache.nbytes <= plain.nbytes * (3 / 8 if dtype == torch.int8 else 1 / 4)


def test_a_long_text_in_eight_bits() -> None:
    model = build(max_position_embeddings=2048)
    tokens = torch.randint(3, 128, (1, 1500))
    cache = QuantizedCache(model.config, tokens=1600)
    with torch.no_grad(), metalcore.accelerate(model):
        truth = model(tokens).logits[:, -1]
        model(tokens[:, :-2], past_key_values=cache)
        room = cache.nbytes
        for i in (1498, 1499):
            found = model(tokens[:, i : i + 1], past_key_values=cache).logits[:, -1]
    assert cache.nbytes == room
    assert error(found, truth) <= ROUNDED


def test_a_prompt_in_parts_and_a_cache_that_grows() -> None:
    model, tokens = windowed("Mistral"), text()
    with torch.no_grad(), metalcore.accelerate(model):
        truth = model(tokens).logits
        cache = PagedCache(model.config, page=2, tokens=2)
        parts = [model(tokens[:, a:b], past_key_values=cache).logits for a, b in ((0, 5), (5, 16))]
        # pages that the window has passed are used again
        for _ in range(20):
            model(tokens[:, :1], past_key_values=cache)
    assert error(torch.cat(parts, 1), truth) <= allowed()
    layer = cache.layers[0]
    assert layer.length == 36
    assert layer.table[:, :-4].max() == -1
    assert layer.k.shape[0] * 2 < 2 * 36


def test_crop_reset_and_selection() -> None:
    model, tokens = build(), text()
    with torch.no_grad(), metalcore.accelerate(model):
        truth = model(tokens).logits
        cache = PagedCache(model.config, page=4)
        model(tokens[:, :12], past_key_values=cache)
        cache.crop(-5)
        assert cache.get_seq_length() == 7
        again = model(tokens[:, 7:], past_key_values=cache).logits
        assert error(again, truth[:, 7:]) <= allowed()
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([2, 1]))
        cache.crop(-1)
        last = model(tokens[[1, 0], 15:], past_key_values=cache).logits
        assert error(last, truth[[1, 0], 15:]) <= allowed()
        cache.reset()
        assert error(model(tokens, past_key_values=cache).logits, truth) <= allowed()


def test_what_is_read_of_a_cache_is_whole() -> None:
    layer = PagedLayer(4, None, 8)
    k, v = torch.randn(2, 2, 3, 7, 8)
    with torch.no_grad():
        layer.update(k[:, :, :4], v[:, :, :4])
        keys, values = layer.update(k[:, :, 4:], v[:, :, 4:])
    assert isinstance(keys, PagedTensor)
    assert torch.equal(keys + 0, k)
    assert torch.equal(values[..., 1:, :], v[..., 1:, :])
    assert torch.equal(torch.cat([keys, values]), torch.cat([k, v]))


def test_half_precision_with_sinks() -> None:
    model, tokens = gpt_oss().bfloat16(), text()
    with torch.no_grad(), metalcore.accelerate(model):
        truth = model(tokens).logits
        cache = PagedCache(model.config)
        model(tokens[:, :-1], past_key_values=cache)
        last = model(tokens[:, -1:], past_key_values=cache).logits
    assert error(last, truth[:, -1:]) <= allowed(torch.bfloat16)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="PagedCache: page must be a power of two, got 3"):
        PagedCache(build().config, page=3)
    with pytest.raises(ValueError, match="PagedCache: dtype must be None, "):
        PagedCache(dtype=torch.int16)
    cache = PagedCache()
    model = build()
    with torch.no_grad():
        model(text(), past_key_values=cache)
    assert len(cache.layers) == LAYERS
    with pytest.raises(ValueError, match="crop takes -n"):
        cache.crop(3)
