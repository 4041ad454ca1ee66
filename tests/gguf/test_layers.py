# SPDX-License-Identifier: MIT
"""Layers of packed weights: what they compute, what they keep, and what goes through them."""

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from metalcore._quantized_layers import GGMLEmbedding, GGMLLinear, Int4Linear, Int8Linear
from metalcore.ops.quant._ggml import FORMATS
from metalcore.ops.quant.quantize_int4 import quantize_int4

MADE: dict[str, Callable[[nn.Linear], Any]] = {
    **{type: partial(GGMLLinear.of, type=type) for type in FORMATS},
    "int4": partial(Int4Linear.of, group_size=32),
    "int4, symmetric": partial(Int4Linear.of, symmetric=True),
    "int8": Int8Linear.of,
}


@pytest.fixture(params=MADE)
def layer(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return MADE[request.param](nn.Linear(256, 24))


def test_a_layer_computes_with_its_values(layer: Any) -> None:
    layer.activation = "float"
    x = torch.randn(2, 3, 256, requires_grad=True)
    wanted = nn.functional.linear(x, layer.dequantized(), layer.bias)
    assert (layer(x) - wanted).abs().max() < 1e-5 * wanted.abs().max()
    dy = torch.randn_like(wanted)
    ours, theirs = (torch.autograd.grad(y, x, dy)[0] for y in (layer(x), wanted))
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()
    assert not layer.weight.requires_grad


def test_a_layer_is_copied_pickled_and_loaded(layer: Any) -> None:
    x = torch.randn(2, 256)
    y = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), y)
    file = io.BytesIO()
    torch.save(layer, file)
    assert file.tell() < 3 * sum(p.nbytes for p in layer.parameters()) + 4000
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), y)
    other = copy.deepcopy(layer)
    nn.init.zeros_(other.bias)
    other.weight.zero_()
    assert not torch.equal(other(x), y)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), y)


def test_any_size_has_4_and_8_bits() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(101, 7, bias=False), torch.randn(3, 101)
    for kind in (Int4Linear, Int8Linear):
        layer = kind.of(linear, 32)
        wanted = x @ layer.dequantized().mT
        assert (layer(x) - wanted).abs().max() < 1e-3 * wanted.abs().max()
        assert layer.bias is None
    with pytest.raises(ValueError, match="multiples of 32"):
        GGMLLinear.of(linear, "q4_0")


def test_groups_of_inputs_that_are_no_neighbours() -> None:
    weight, order = torch.randn(8, 64), torch.randperm(64)
    layer = Int4Linear.from_quantized(quantize_int4(weight[:, order], 32), order=order)
    x = torch.randn(5, 64)
    assert (layer.dequantized() - weight).abs().max() < 0.5
    wanted = x @ layer.dequantized().mT
    assert (layer(x) - wanted).abs().max() < 1e-3 * wanted.abs().max()


@pytest.mark.parametrize("type", FORMATS)
def test_an_embedding_unpacks_the_rows_that_are_asked_for(type: str) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(10, 256)
    layer = GGMLEmbedding.of(table, type)
    rows = torch.tensor([[3, 0], [9, 3]])
    assert torch.equal(layer(rows), layer.dequantized()[rows])
    assert layer.to(torch.bfloat16)(rows).dtype == torch.bfloat16
    scaled = GGMLEmbedding.from_blocks(layer.weight, type, scale=50.6)
    assert torch.equal(scaled(rows), layer.dequantized()[rows] * torch.tensor(50.6))


def test_layers_have_no_random_values_and_say_what_they_are() -> None:
    layer = GGMLLinear(256, 8, type="q6_K")
    layer.reset_parameters()
    assert layer.weight.shape == (8, 210)
    assert "type=q6_K" in repr(layer)
    assert "group_size=64" in repr(Int4Linear(64, 8))
    with pytest.raises(ValueError, match="must be one of"):
        GGMLLinear(256, 8, type="q4_k")
