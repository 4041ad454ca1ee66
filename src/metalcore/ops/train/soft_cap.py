# SPDX-License-Identifier: MIT
"""Soft cap: y = cap * tanh(x / cap)."""

from typing import Any

import torch
from torch import Tensor

from metalcore._check import expect_float, expect_positive
from metalcore._op import Example, Op, accumulate
from metalcore.ops.train._elementwise import in_memory_order

_forward = Op("soft_cap(Tensor x, float cap) -> Tensor", batched=True, sharding="* -> *")
_backward = Op(
    "soft_cap_backward(Tensor dy, Tensor x, float cap) -> Tensor",
    batched=True,
    sharding="*, * -> *",
)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """`cap * tanh(x / cap)`: x where it is small, and never beyond +-cap.

    Args:
        x: any shape, float32, float64, float16 or bfloat16.
        cap: greater than 0.

    Returns:
        The shape, layout and dtype of `x`. Computed in float32 (float64 for float64).

    Example:
        >>> logits = metalcore.soft_cap(logits, 30.0)
    """
    expect_positive("soft_cap", cap=cap)
    expect_float("soft_cap", x=x)
    return in_memory_order(lambda x: _forward(x, float(cap)), x)


@_forward.reference
def _(x: Tensor, cap: float) -> Tensor:
    y = cap * torch.tanh(accumulate(x) / cap)
    return y.to(x.dtype, memory_format=torch.contiguous_format)


@_backward.reference
def _(dy: Tensor, x: Tensor, cap: float) -> Tensor:
    twice = accumulate(x) * (2 / cap)
    dx = accumulate(dy) * 4 * torch.sigmoid(twice) * torch.sigmoid(-twice)
    return dx.to(x.dtype, memory_format=torch.contiguous_format)


_backward.differentiate_reference()


@_forward.example
def _(dtype: torch.dtype) -> Example:
    return Example((torch.randn(5, 1000).to(dtype), 1.5), 1)


@_backward.example
def _(dtype: torch.dtype) -> Example:
    return Example((torch.randn(5, 1000).to(dtype), torch.randn(5, 1000).to(dtype), 1.5), 1)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.cap = inputs
    ctx.save_for_backward(x)


@_forward.gradient(save=_save)
def _(ctx: Any, dy: Tensor) -> Any:
    return _backward(dy, *ctx.saved_tensors, ctx.cap), None
