# SPDX-License-Identifier: MIT
"""Blocks of ggml: bytes as llama.cpp makes them, and the values they stand for."""

from hashlib import sha256

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

import metalcore
from metalcore._op import Op
from metalcore.ops.quant._ggml import FORMATS
from metalcore.ops.quant.quantize_ggml import quantize_meaning
from tests.backends import FLOATS, Backend
from tests.check import check_op

# The package `gguf` has no quantizer for these. What ggml's own makes of `spread`, as it is, in
# bfloat16 and in whole numbers.
GOLDEN = {
    "q4_K": ("8abfb4ff9042674e", "64175559e93bfe79", "cbaa3a7f6210e267"),
    "q5_K": ("845f6e718c6b147a", "a8ae91753f916d0a", "dfa7679ad72c79fa"),
    "q6_K": ("8567ab1da8f4ec7e", "d3b78fe9f681a61e", "ee690f75c3dd740f"),
    "iq4_nl": ("640d605d3e91f405", "cbaad00d68667879", "18bb4d85d9f28a29"),
}
SIMPLE = [name for name in FORMATS if name not in GOLDEN]
COUNT = 1 << 20


def weights(count: int) -> dict[str, Tensor]:
    """Numbers that round in every way: a contraction of products and sums shows in the last two."""
    normal = torch.randn(count)
    mixed = normal.clone()
    mixed[::7] = 0
    mixed.view(-1, 256)[1::4] = 0
    mixed.view(-1, 32)[::5] = -1.25
    return {
        "normal": normal,
        "mixed": mixed,
        "tiny": normal * 1e-30,
        "bfloat16": normal.bfloat16().float(),
        "integers": torch.randint(-40, 41, (count,)).float(),
    }


def spread(count: int) -> Tensor:
    i = torch.arange(count)
    fraction = (i * 2654435761 % (1 << 32)).double() / (1 << 32) - 0.5
    return (fraction * (1 + i // 32 % 7)).float()


def kind_of(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name.upper()]


@pytest.mark.parametrize("name", SIMPLE)
def test_bytes_are_those_of_gguf(name: str) -> None:
    for kind, x in weights(COUNT).items():
        x = x.view(-1, 512)
        expected = torch.from_numpy(gguf.quantize(x.numpy(), kind_of(name)))
        assert torch.equal(metalcore.quantize_ggml(x, name), expected), kind
        some = x[:16]
        assert torch.equal(quantize_meaning(some, FORMATS[name].id), expected[:16]), kind


@pytest.mark.parametrize("name", list(GOLDEN))
def test_bytes_are_those_of_llama_cpp(name: str) -> None:
    x = spread(1 << 16)
    for values, expected in zip((x, x.bfloat16(), (x * 16).round()), GOLDEN[name], strict=True):
        blocks = metalcore.quantize_ggml(values.view(-1, 512), name)
        assert sha256(blocks.numpy().tobytes()).hexdigest()[:16] == expected


@pytest.mark.parametrize("name", list(GOLDEN))
def test_a_search_is_that_of_the_meaning(name: str) -> None:
    for kind, x in weights(1 << 14).items():
        expected = quantize_meaning(x.view(-1, 512), FORMATS[name].id)
        assert torch.equal(metalcore.quantize_ggml(x.view(-1, 512), name), expected), kind


SAMPLE = torch.zeros(32)
SAMPLE[[0, 1, 2, 3, 16, 17, 31]] = torch.tensor([-4, 3.5, 0.25, -0.25, 1, 4, 0.75])
WORKED = {
    "q4_0": "0038a0ff89" + 12 * "88" + "a8",
    "q4_1": "443800c490fe78" + 12 * "77" + "97",
    "q5_0": "0034f6ffffff40fe010f" + 11 * "00" + "30",
    "q8_0": "0828816f08f8" + 12 * "00" + "207f" + 13 * "00" + "18",
    "mxfp4": "7f2e6500" + 12 * "00" + "10",
}


@pytest.mark.parametrize("name", list(WORKED))
def test_a_block_by_hand(name: str) -> None:
    assert metalcore.quantize_ggml(SAMPLE, name).numpy().tobytes().hex() == WORKED[name]


def test_a_ramp_in_q4_k() -> None:
    i = torch.arange(256)
    ramp = (i % 32 - 16) / 8 * (1 + i // 32) / 8
    blocks = metalcore.quantize_ggml(ramp, "q4_K")
    assert blocks[:20].numpy().tobytes().hex() == "111ce2278890d8e08890d8e077ff77ff00001111"
    values = metalcore.dequantize_ggml(blocks, "q4_K")
    torch.testing.assert_close(
        values[[0, 224]], torch.tensor([-0.2463, -1.9399]), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("name", list(FORMATS))
def test_any_bytes_have_the_values_of_gguf(name: str) -> None:
    """Every byte is legal, those of scales too: NaN and infinity are what they stand for."""
    f = FORMATS[name]
    blocks = torch.randint(256, (64, 4 * f.bytes), dtype=torch.uint8)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.dequantize(blocks.numpy(), kind_of(name)))
    found = metalcore.dequantize_ggml(blocks, name)
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    assert torch.equal(found.isnan(), expected.isnan())
    for dtype in FLOATS:
        other = metalcore.dequantize_ggml(blocks.view(8, 8, -1), name, dtype)
        assert torch.equal(other.nan_to_num(), expected.view(8, 8, -1).to(dtype).nan_to_num())


@pytest.mark.parametrize("name", list(FORMATS))
def test_matches_reference(name: str) -> None:
    for dtype in FLOATS:
        for rows in (0, 1, 3):
            weight = torch.randn(rows, 2, 512).to(dtype)
            args = (weight, FORMATS[name].id)
            check_op(Backend("cpu"), "quantize_ggml", args, reduces_over=1, differentiable=False)


def test_no_rows_at_an_odd_place() -> None:
    for form in FORMATS.values():
        blocks = torch.zeros(form.bytes + 1, dtype=torch.uint8)[1:].view(1, -1)[:0]
        args = (blocks, form.id, torch.float32)
        meaning = Op.all["dequantize_ggml"].meaning
        assert meaning(*args).shape == (0, form.values)


def test_registration_and_compile() -> None:
    weight = torch.randn(3, 64)
    torch.library.opcheck(torch.ops.metalcore_kernels.quantize_ggml.default, (weight, 2))
    blocks = metalcore.quantize_ggml(weight, "q4_0")
    args = (blocks, 2, torch.bfloat16)
    torch.library.opcheck(torch.ops.metalcore_kernels.dequantize_ggml.default, args)

    def there_and_back(w: Tensor) -> Tensor:
        return metalcore.dequantize_ggml(metalcore.quantize_ggml(w, "q8_0"), "q8_0")

    run = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")
    assert torch.equal(run(weight), there_and_back(weight))


def test_names_of_q4_0() -> None:
    weight = torch.randn(3, 64)
    blocks = metalcore.quantize_ggml_q4_0(weight)
    assert torch.equal(blocks, metalcore.quantize_ggml(weight, "q4_0"))
    values = metalcore.dequantize_ggml_q4_0(blocks, torch.float16)
    assert torch.equal(values, metalcore.dequantize_ggml(blocks, "q4_0", torch.float16))


def test_bad_input_is_named() -> None:
    weight = torch.randn(4, 64)
    bad = [
        (lambda: metalcore.quantize_ggml(weight, "q9_0"), "type must be one of q4_0, q4_1, q5_0"),
        (
            lambda: metalcore.quantize_ggml(weight, "q4_K"),
            "rows of q4_K are multiples of 256 values, got [4, 64]",
        ),
        (
            lambda: metalcore.quantize_ggml(weight * torch.nan, "q4_0"),
            "weights must be finite and at most 65504, got nan",
        ),
        (
            lambda: metalcore.quantize_ggml(weight * 0 + 1e5, "q4_0"),
            "weights must be finite and at most 65504, got 100000.0",
        ),
    ]
    for call, message in bad:
        with pytest.raises(ValueError, match="quantize_ggml: ") as caught:
            call()
        assert str(caught.value).startswith(f"quantize_ggml: {message}")
    blocks = metalcore.quantize_ggml(weight, "q4_0")
    with pytest.raises(ValueError, match="rows of q8_0 are of 34 bytes per block"):
        metalcore.dequantize_ggml(blocks, "q8_0")
    with pytest.raises(TypeError, match="dtype must be one of float32"):
        metalcore.dequantize_ggml(blocks, "q4_0", torch.int32)
