# SPDX-License-Identifier: MIT
"""SiLU, x * sigmoid(x), alone and of x + bias."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metalcore._check import expect_float
from metalcore._op import Example, Op, accumulate
from metalcore._route import Values
from metalcore.ops.train._elementwise import in_memory_order, sum_rows, with_bias

_route = Values("silu")

_forward = Op("silu(Tensor x) -> Tensor", batched=True, sharding="* -> *")
_backward = Op("silu_backward(Tensor dy, Tensor x) -> Tensor", batched=True, sharding="*, * -> *")
_bias_forward = Op("bias_silu(Tensor x, Tensor bias) -> Tensor", sharding="*n, n -> *n")
_bias_backward = Op(
    "bias_silu_backward(Tensor dy, Tensor x, Tensor bias) -> Tensor", sharding="*n, *n, n -> *n"
)


def silu(x: Tensor) -> Tensor:
    """`x * sigmoid(x)`, equal to `torch.nn.functional.silu`.

    Args:
        x: any shape, float32, float64, float16 or bfloat16.

    Returns:
        The shape, layout and dtype of `x`. Computed in float32 (float64 for float64).

    Example:
        >>> y = metalcore.silu(torch.randn(2, 5, 1025))
    """
    expect_float("silu", x=x)
    if _route.prefers_torch(x):
        return _route.by_torch(F.silu, x)
    return in_memory_order(_forward, x)


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
    x, bias = with_bias("bias_silu", x, bias)
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
