# SPDX-License-Identifier: MIT
"""A recorded step of a model: tokens in, logits out, keys and values into the cache."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from metalcore._check import expect_same_device, refuse, shape
from metalcore._op import Example, Op
from metalcore.ops.attention._eight_bit import encoded
from metalcore.ops.decode._tape import Place, Replay, Tape, read, rotary_table

_step = Op(
    "decode_step(str tape, Tensor[] tensors, Tensor(a!) cache, Tensor tokens, Tensor rows,"
    " Tensor slots, Tensor starts, Tensor(b!)? scales) -> Tensor"
)


def decode_step(
    tape: str,
    tensors: Sequence[Tensor],
    cache: Tensor,
    tokens: Tensor,
    rows: Tensor,
    slots: Tensor,
    starts: Tensor,
    scales: Tensor | None = None,
) -> Tensor:
    """Replay a tape for M tokens at once: each in its own row and place of the cache.

    `metalcore.decoder` records tapes and calls this; there is no need to do so yourself. It has no
    gradient. Numbers between the nodes are float32.

    Args:
        tape: a line for each node, after one for the buffers.
        tensors: what it counts: weights, biases, tables of cosines and sines. Contiguous.
        cache: keys and values, [layers, 2, rows, heads, slots, size], contiguous; float32, float16,
            bfloat16 or int8. Written in place.
        tokens: int64 [M].
        rows, slots: int64 [M]: where in the cache the keys of each token go. No two go to one
            place. Tokens of one row see each other as their slots follow.
        starts: int64 [M]: the first slot of the row that counts; positions count from there.
        scales: float32 [layers, 2, rows, heads, slots], for a cache of int8: the number that the
            codes of a token and head are times. Written in place.

    Returns:
        What the tape names as its result, float32 [M, n].

    Example:
        >>> logits = metalcore.decode_step(text, tensors, cache, tokens, rows, slots, starts)
    """
    op = "decode_step"
    if cache.dim() != 6 or cache.shape[1] != 2:
        refuse(op, f"cache must be [layers, 2, rows, heads, slots, size], got {shape(cache)}")
    counts = {"tokens": tokens, "rows": rows, "slots": slots, "starts": starts}
    for name, x in counts.items():
        if x.dim() != 1 or x.dtype != torch.int64 or x.shape != tokens.shape:
            refuse(op, f"{name} must be int64 [M], one for each token, got {shape(x)}")
    if (scales is not None) != (cache.dtype == torch.int8):
        refuse(op, f"scales are for a cache of int8, which needs them; got {cache.dtype}")
    if scales is not None and (scales.dtype != torch.float32 or scales.shape != cache.shape[:-1]):
        refuse(op, f"scales must be float32 {list(cache.shape[:-1])}, got {shape(scales)}")
    expect_same_device(op, cache=cache, scales=scales, **counts)
    found: Tensor = _step(tape, tensors, cache, tokens, rows, slots, starts, scales)
    return found


@_step.reference
def _(
    tape: str,
    tensors: Sequence[Tensor],
    cache: Tensor,
    tokens: Tensor,
    rows: Tensor,
    slots: Tensor,
    starts: Tensor,
    scales: Tensor | None,
) -> Tensor:
    sizes, out, nodes = read(tape)
    replay = Replay(sizes, tensors, cache, tokens, rows, slots, starts, scales)
    for node in nodes:
        replay.run(node)
    return replay.buffers[out]


def small_tape(dtype: torch.dtype, *, interleaved: bool = False) -> Tape:
    """Of a model with one layer of every kind of node: 24 wide, 4 heads of 8 over 2, 40 tokens."""
    tape, width, size = Tape(), 24, 8
    x, h, qkv, attended = (tape.buffer(n) for n in (width, width, 64, 32))
    gate, logits = tape.buffer(2 * 20), tape.buffer(40)

    def weight(n: int, k: int) -> int:
        return tape.tensor((torch.randn(n, k) / k**0.5).to(dtype))

    tape.add("embed", y=x, w=weight(40, width), n=width, scale=2.0)
    tape.add("norm", x=x, y=h, w=tape.tensor(torch.rand(width) + 0.5), n=width, eps=1e-6)
    bias = tape.tensor(torch.randn(64))
    tape.add("linear", x=h, y=qkv, w=weight(64, width), bias=bias, n=64, k=width)
    tape.add("norm", x=qkv, y=qkv, w=tape.tensor(torch.rand(size)), n=size, times=4, eps=1e-6)
    angle = torch.arange(9.0)[:, None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
    table = tape.tensor(rotary_table(angle.cos(), angle.sin(), 4, interleaved))
    heads = {"heads": 4, "key_heads": 2, "size": size, "layer": 0}
    turn = {"rotary": 4, "interleaved": int(interleaved)}
    tape.add("rope", x=qkv, y=qkv + 32, z=qkv + 48, w=table, **heads, **turn)
    sinks = tape.tensor(torch.randn(4))
    tape.add("attend", x=qkv, y=attended, w=sinks, scale=0.4, cap=5.0, window=6, **heads)
    tape.add("linear", x=attended, y=x, w=weight(width, 32), n=width, k=32, add=1, scale=0.5)
    tape.add("linear", x=x, y=gate, w=weight(40, width), n=40, k=width)
    tape.add("glu", x=gate, z=gate + 20, y=gate, n=20, act=2)
    tape.add("linear", x=gate, y=h, w=weight(width, 20), n=width, k=20)
    tape.add("add", x=h, y=x, n=width, scale=0.7)
    tape.add("linear", x=x, y=logits, w=weight(40, width), n=40, k=width)
    tape.add("soft_cap", x=logits, y=logits, n=40, cap=3.0)
    return tape


@_step.example
def _(dtype: torch.dtype) -> Example:
    kept = torch.float32 if dtype == torch.float64 else dtype
    return Example(small_arguments(kept, torch.randn(1, 2, 3, 2, 9, 8).to(kept)), reduces_over=64)


@_step.example
def _(dtype: torch.dtype) -> Example:
    """Keys and values in 8 bits."""
    kept = torch.float32 if dtype == torch.float64 else dtype
    codes, scales = encoded(torch.randn(1, 2, 3, 2, 9, 8), torch.int8, has_scale=True)
    return Example(small_arguments(kept, codes, scales), reduces_over=64)


def small_arguments(
    dtype: torch.dtype, cache: Tensor, scales: Tensor | None = None
) -> tuple[Any, ...]:
    """A step of `small_tape` for three tokens of two rows."""
    tape = small_tape(dtype)
    rows, slots = torch.tensor([2, 0, 2]), torch.tensor([6, 0, 7])
    starts = torch.tensor([1, 0, 1])
    args = (tape.text(tape_end(tape)), tape.tensors, cache, torch.tensor([7, 39, 0]))
    return (*args, rows, slots, starts, scales)


def tape_end(tape: Tape) -> Place:
    """The last buffer, which `small_tape` has its result in."""
    return Place(len(tape.buffers) - 1)
