# SPDX-License-Identifier: MIT
"""A tape gives what its nodes mean, for any tokens at once, and refuses what it cannot reach."""

from typing import Any

import pytest
import torch
from torch import Tensor

import metalcore
from metalcore._accuracy import error
from metalcore._op import Op
from metalcore.ops.attention._eight_bit import encoded
from metalcore.ops.decode._tape import Tape
from metalcore.ops.decode.decode_step import small_tape, tape_end
from metalcore.ops.quant._ggml import FORMATS
from tests.backends import Backend
from tests.check import check_op

HALVES = (torch.float32, torch.float16, torch.bfloat16)


def arguments(dtype: torch.dtype, interleaved: bool = False) -> tuple[Any, ...]:
    tape = small_tape(dtype, interleaved=interleaved)
    cache = torch.randn(1, 2, 3, 2, 9, 8).to(dtype)
    tokens = torch.tensor([7, 39, 0, 11])
    rows, slots = torch.tensor([2, 0, 2, 1]), torch.tensor([6, 0, 7, 8])
    starts = torch.tensor([1, 0, 1, 4])
    return tape.text(tape_end(tape)), tape.tensors, cache, tokens, rows, slots, starts


@pytest.mark.parametrize("interleaved", [False, True])
def test_matches_reference(backend: Backend, interleaved: bool) -> None:
    for dtype in HALVES:
        args = (*arguments(dtype, interleaved), None)
        check_op(backend, "decode_step", args, reduces_over=64, differentiable=False)


@pytest.mark.parametrize("interleaved", [False, True])
def test_keys_and_values_in_8_bits(backend: Backend, interleaved: bool) -> None:
    for dtype in HALVES:
        text, tensors, cache, *places = arguments(dtype, interleaved)
        codes, scales = encoded(cache, torch.int8, has_scale=True)
        args = (text, tensors, codes, *places, scales)
        check_op(backend, "decode_step", args, reduces_over=64, differentiable=False)


def test_no_tokens() -> None:
    text, tensors, cache, *_ = arguments(torch.float32)
    none = torch.zeros(0, dtype=torch.int64)
    assert metalcore.decode_step(text, tensors, cache, none, none, none, none).shape == (0, 40)


def test_tokens_together_are_tokens_one_by_one() -> None:
    text, tensors, cache, *places = arguments(torch.float32)
    alone = cache.clone()
    together = metalcore.decode_step(text, tensors, cache, *places)
    order = places[2].argsort()
    for i in order.tolist():
        one = metalcore.decode_step(text, tensors, alone, *(x[i : i + 1] for x in places))
        torch.testing.assert_close(one[0], together[i])
    torch.testing.assert_close(alone, cache)


def test_what_lies_past_a_token_is_not_read() -> None:
    text, tensors, cache, *places = arguments(torch.float32)
    dirty = cache.clone()
    dirty[:, :, 1, :, :4] = torch.nan  # before the start of its row
    dirty[:, :, 2, :, 8:] = torch.nan
    a = metalcore.decode_step(text, tensors, cache, *places)
    b = metalcore.decode_step(text, tensors, dirty, *places)
    assert torch.equal(a, b)


def packed(name: str, x: Tensor, weight: Tensor) -> tuple[Tape, Any, Tensor]:
    """A tape of one product with packed weights, and what the op of these gives."""
    tape = Tape()
    n, k = weight.shape
    a, y = tape.buffer(k), tape.buffer(n)
    tape.add("embed", y=a, w=tape.tensor(x), n=k)
    fields: dict[str, Any]
    if name in FORMATS:
        form = FORMATS[name]
        blocks = metalcore.quantize_ggml(weight, name)
        tiles = metalcore.pack_ggml(blocks, name)
        fields = {"w": tape.tensor(blocks), "type": form.id}
        parts = k // 32
        truth = metalcore.matmul_ggml(x, blocks, name, activation="int16", tiles=tiles)
    else:
        q = metalcore.quantize_int4(weight, 64)
        tiles = metalcore.pack_int4(q)
        fields = {"bits": 4, "group": 64, "offsets": 1, "w": tape.tensor(q.packed)}
        fields |= {"scales": tape.tensor(q.scale), "biases": tape.tensor(q.bias)}
        parts = -(-k // 64) * 2
        truth = metalcore.matmul_int4(x, q, activation="int16", tiles=tiles)
    tape.add("quantize", x=a, n=k, bytes=2, parts=parts)
    tape.add("linear", x=a, y=y, tiles=tape.tensor(tiles), n=n, k=k, **fields)
    return tape, y, truth


@pytest.mark.parametrize("name", [*FORMATS, "int4"])
def test_packed_weights_are_multiplied_bit_for_bit_as_by_their_op(name: str) -> None:
    for count in (1, 3, 5):
        tape, y, truth = packed(name, torch.randn(count, 256), torch.randn(37, 256))
        cache, zero = torch.zeros(1, 2, count, 1, 1, 4), torch.zeros(count, dtype=torch.int64)
        places = (torch.arange(count), torch.arange(count), zero, zero)
        found = metalcore.decode_step(tape.text(y), tape.tensors, cache, *places)
        assert torch.equal(found, truth)


@pytest.mark.parametrize("name", ["q4_0", "q6_K", "int4"])
def test_packed_weights_on_metal(name: str) -> None:
    tape, y, truth = packed(name, torch.randn(2, 256), torch.randn(20, 256))
    cache, zero = torch.zeros(1, 2, 2, 1, 1, 4), torch.zeros(2, dtype=torch.int64)
    places = (torch.arange(2), torch.arange(2), zero, zero)
    with Backend("sim"):
        found = metalcore.decode_step(tape.text(y), tape.tensors, cache, *places)
    # the CPU rounds activations to 16 bits
    assert error(found, truth) < 1e-4


def test_any_number_of_threads_gives_the_same() -> None:
    tape, y, _ = packed("q4_0", torch.randn(2, 1024), torch.randn(1600, 1024))
    cache, zero = torch.zeros(1, 2, 2, 1, 1, 4), torch.zeros(2, dtype=torch.int64)
    args = (tape.text(y), tape.tensors, cache, torch.arange(2), torch.arange(2), zero, zero)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(metalcore.decode_step(*args))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


BROKEN = {
    "another node": lambda t: t.replace("norm ", "norn ", 1),
    "another name": lambda t: t.replace("eps=", "eqs=", 1),
    "no number": lambda t: t.replace("n=24", "n=2x4", 1),
    "past its buffer": lambda t: t.replace("n=64 k=24", "n=65 k=24", 1),
    "past the tensors": lambda t: t.replace("w=0 ", "w=99 ", 1),
    "another layer": lambda t: t.replace("layer=0", "layer=1", 1),
    "other heads": lambda t: t.replace("key_heads=2", "key_heads=4", 1),
    "no buffers": lambda t: t.split("\n", 1)[1],
    "nothing": lambda t: "",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_tape_is_an_error(kind: str) -> None:
    text, *rest = arguments(torch.float32)
    with pytest.raises((RuntimeError, ValueError)):
        metalcore.decode_step(BROKEN[kind](text), *rest)


def test_weights_of_another_length_are_an_error() -> None:
    text, tensors, *rest = arguments(torch.float32)
    rows = [i for i, x in enumerate(tensors) if x.dim() == 1]
    assert len(rows) == 4  # two norms, a bias and sinks
    for i in rows:
        for other in (tensors[i][1:], torch.cat([tensors[i], tensors[i][:1]])):
            with pytest.raises(RuntimeError, match="values, the tape needs"):
                metalcore.decode_step(text, [*tensors[:i], other, *tensors[i + 1 :]], *rest)


def test_a_token_without_a_place_is_an_error() -> None:
    text, tensors, cache, *places = arguments(torch.float32)
    for which, value in ((0, 40), (0, -1), (1, 3), (2, 9), (3, 7)):
        wrong = [x.clone() for x in places]
        wrong[which][0] = value
        with pytest.raises((RuntimeError, ValueError, IndexError)):
            metalcore.decode_step(text, tensors, cache, *wrong)


def test_shapes_are_checked_in_words() -> None:
    text, tensors, cache, *places = arguments(torch.float32)
    with pytest.raises(ValueError, match="cache must be"):
        metalcore.decode_step(text, tensors, cache[0], *places)
    with pytest.raises(ValueError, match="slots must be int64"):
        metalcore.decode_step(text, tensors, cache, *places[:2], places[2].float(), places[3])
    with pytest.raises(ValueError, match="scales are for a cache of int8"):
        metalcore.decode_step(text, tensors, cache.to(torch.int8), *places)
    with pytest.raises(ValueError, match="scales must be float32"):
        metalcore.decode_step(text, tensors, cache.to(torch.int8), *places, cache[..., 0].half())


def test_it_has_no_gradient() -> None:
    assert not Op.all["decode_step"].is_differentiable
