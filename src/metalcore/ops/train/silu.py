# SPDX-License-Identifier: MIT
"""SiLU, x * sigmoid(x), alone and of x + bias."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metalcore._check import FLOATS
from metalcore._op import Example, Op, accumulate
from metalcore._policy import policy
from metalcore._trace import left_to_torch
from metalcore.ops.train._elementwise import (
    alike,
    are_rows_of,
    in_memory_order,
    is_recorded_below,
    sum_rows,
    with_bias,
)

_KNOBS = policy("silu", "cpu")
_SMALL: int = _KNOBS["torch_below"]
_SMALL_RECORDED: int = _KNOBS["torch_below_gradient"]
# What F.silu calls: 1.15x for 64 values.
_torch_silu = F.silu

_forward = Op("silu(Tensor x) -> Tensor", batched=True)
_backward = Op("silu_backward(Tensor dy, Tensor x) -> Tensor", batched=True)
_bias_forward = Op("bias_silu(Tensor x, Tensor bias) -> Tensor")
_bias_backward = Op("bias_silu_backward(Tensor dy, Tensor x, Tensor bias) -> Tensor")


def silu(x: Tensor) -> Tensor:
    """`x * sigmoid(x)`, equal to `torch.nn.functional.silu`.

    Args:
        x: any shape, float32, float64, float16 or bfloat16.

    Returns:
        The shape, layout and dtype of `x`. Computed in float32 (float64 for float64).

    Example:
        >>> y = metalcore.silu(torch.randn(2, 5, 1025))
    """
    small = x.numel() < _SMALL or is_recorded_below(_SMALL_RECORDED, x)
    if small and x.dtype in FLOATS and left_to_torch("silu", x):
        return _torch_silu(x)
    if x.dtype in FLOATS and x.is_contiguous():
        return _forward(x)  # type: ignore[no-any-return]
    return in_memory_order(_forward, *alike("silu", x=x))


def bias_silu(x: Tensor, bias: Tensor) -> Tensor:
    """`silu(x + bias)` in one pass.

    Args:
        x: [..., n].
        bias: [n].

    Returns:
        [..., n], in the dtype of `x`, or the wider one of `bias`.

    Example:
        >>> y = metalcore.bias_silu(x @ weight.T, bias)
    """
    small = x.numel() < _SMALL or is_recorded_below(_SMALL_RECORDED, x, bias)
    if not are_rows_of(bias, x):
        x, bias = with_bias("bias_silu", x, bias)
    elif small and left_to_torch("bias_silu", x):
        return _torch_silu(x + bias)
    return _bias_forward(x, bias)  # type: ignore[no-any-return]


def silu_slope(x: Tensor) -> Tensor:
    """The derivative of silu, in plain torch."""
    s = torch.sigmoid(x)
    return s + x * s * torch.sigmoid(-x)


@_forward.reference
def _(x: Tensor) -> Tensor:
    y = F.silu(accumulate(x))
    return y.to(x.dtype, memory_format=torch.contiguous_format)


@_backward.reference
def _(dy: Tensor, x: Tensor) -> Tensor:
    dx = accumulate(dy) * silu_slope(accumulate(x))
    return dx.to(x.dtype, memory_format=torch.contiguous_format)


@_bias_forward.reference
def _(x: Tensor, bias: Tensor) -> Tensor:
    y = F.silu(accumulate(x) + accumulate(bias))
    return y.to(x.dtype, memory_format=torch.contiguous_format)


@_bias_backward.reference
def _(dy: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    dx = accumulate(dy) * silu_slope(accumulate(x) + accumulate(bias))
    return dx.to(x.dtype, memory_format=torch.contiguous_format)


_backward.differentiate_reference()
_bias_backward.differentiate_reference()


@_forward.example
def _(dtype: torch.dtype) -> Example:
    return Example((torch.randn(5, 1000).to(dtype),), 1)


@_backward.example
def _(dtype: torch.dtype) -> Example:
    return Example((torch.randn(5, 1000).to(dtype), torch.randn(5, 1000).to(dtype)), 1)


@_bias_forward.example
def _(dtype: torch.dtype) -> Example:
    return Example((torch.randn(5, 1000).to(dtype), torch.randn(1000).to(dtype)), 1)


@_bias_backward.example
def _(dtype: torch.dtype) -> Example:
    x = torch.randn(5, 1000).to(dtype)
    return Example((x.flip(1), x, torch.randn(1000).to(dtype)), 1)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


@_forward.gradient(save=_save)
def _(ctx: Any, dy: Tensor) -> Any:
    return _backward(dy, *ctx.saved_tensors)


@_bias_forward.gradient(save=_save)
def _(ctx: Any, dy: Tensor) -> Any:
    dx = _bias_backward(dy, *ctx.saved_tensors)
    return dx, sum_rows(dx) if ctx.needs_input_grad[1] else None
