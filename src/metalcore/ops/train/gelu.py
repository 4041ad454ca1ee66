# SPDX-License-Identifier: MIT
"""GELU, exact or by tanh, alone and of x + bias."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metalcore._check import expect_float, expect_one_of
from metalcore._op import Example, Op, accumulate
from metalcore._route import Values
from metalcore.ops.train._elementwise import in_memory_order, sum_rows, with_bias

_routes = {
    "none": Values("gelu", "none"),
    "tanh": Values("gelu", "tanh", lambda x: (x, "tanh")),
}

_forward = Op("gelu(Tensor x, bool tanh) -> Tensor", batched=True, sharding="* -> *")
_backward = Op(
    "gelu_backward(Tensor dy, Tensor x, bool tanh) -> Tensor", batched=True, sharding="*, * -> *"
)
_bias_forward = Op("bias_gelu(Tensor x, Tensor bias, bool tanh) -> Tensor", sharding="*n, n -> *n")
_bias_backward = Op(
    "bias_gelu_backward(Tensor dy, Tensor x, Tensor bias, bool tanh) -> Tensor",
    sharding="*n, *n, n -> *n",
)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Gaussian error linear unit, equal to `torch.nn.functional.gelu`.

    Args:
        x: any shape, float32, float64, float16 or bfloat16.
        approximate: "none" for x * P(X <= x) with a standard normal X, "tanh" for the
            approximation of it.

    Returns:
        The shape, layout and dtype of `x`. Computed in float32 (float64 for float64).

    Example:
        >>> y = metalcore.gelu(torch.randn(2, 5, 1025), approximate="tanh")
    """
    tanh = is_tanh("gelu", approximate)
    expect_float("gelu", x=x)
    route = _routes[approximate]
    if route.prefers_torch(x):
        return route.by_torch(F.gelu, x, approximate=approximate)
    return in_memory_order(lambda x: _forward(x, tanh), x)


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """`gelu(x + bias)` in one pass.

    Args:
        x: [..., n].
        bias: [n].
        approximate: "none" or "tanh", as for `gelu`.

    Returns:
        [..., n], in the dtype of `x`, or the wider one of `bias`.

    Example:
        >>> y = metalcore.bias_gelu(x @ weight.T, bias)
    """
    tanh = is_tanh("bias_gelu", approximate)
    x, bias = with_bias("bias_gelu", x, bias)
    return _bias_forward(x, bias, tanh)  # type: ignore[no-any-return]


def is_tanh(op: str, approximate: str) -> bool:
    expect_one_of(op, "approximate", approximate, tuple(_routes))
    return approximate == "tanh"


def gelu_and_slope(x: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """gelu(x) and its derivative, in plain torch."""
    if tanh:
        linear, cubic = math.sqrt(8 / math.pi), math.sqrt(8 / math.pi) * 0.044715
        u = x * (linear + cubic * x * x)
        s = torch.sigmoid(u)
        return x * s, s + x * s * torch.sigmoid(-u) * (linear + 3 * cubic * x * x)
    below = (1 + torch.erf(x * math.sqrt(0.5))) / 2
    return x * below, below + x * torch.exp(x * x / -2) / math.sqrt(2 * math.pi)


@_forward.reference
def _(x: Tensor, tanh: bool) -> Tensor:
    y = F.gelu(accumulate(x), approximate="tanh" if tanh else "none")
    return y.to(x.dtype, memory_format=torch.contiguous_format)


@_backward.reference
def _(dy: Tensor, x: Tensor, tanh: bool) -> Tensor:
    dx = accumulate(dy) * gelu_and_slope(accumulate(x), tanh)[1]
    return dx.to(x.dtype, memory_format=torch.contiguous_format)


@_bias_forward.reference
def _(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    y = F.gelu(accumulate(x) + accumulate(bias), approximate="tanh" if tanh else "none")
    return y.to(x.dtype, memory_format=torch.contiguous_format)


@_bias_backward.reference
def _(dy: Tensor, x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    dx = accumulate(dy) * gelu_and_slope(accumulate(x) + accumulate(bias), tanh)[1]
    return dx.to(x.dtype, memory_format=torch.contiguous_format)


_backward.differentiate_reference()
_bias_backward.differentiate_reference()


@_forward.example
def _(dtype: torch.dtype) -> Example:
    return Example((torch.randn(5, 1000).to(dtype), True), 1)


@_backward.example
def _(dtype: torch.dtype) -> Example:
    return Example((torch.randn(5, 1000).to(dtype), torch.randn(5, 1000).to(dtype), False), 1)


@_bias_forward.example
def _(dtype: torch.dtype) -> Example:
    return Example((torch.randn(5, 1000).to(dtype), torch.randn(1000).to(dtype), False), 1)


@_bias_backward.example
def _(dtype: torch.dtype) -> Example:
    x = torch.randn(5, 1000).to(dtype)
    return Example((x.flip(1), x, torch.randn(1000).to(dtype), True), 1)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.tanh = inputs
    ctx.save_for_backward(*tensors)


@_forward.gradient(save=_save)
def _(ctx: Any, dy: Tensor) -> Any:
    return _backward(dy, *ctx.saved_tensors, ctx.tanh), None


@_bias_forward.gradient(save=_save)
def _(ctx: Any, dy: Tensor) -> Any:
    dx = _bias_backward(dy, *ctx.saved_tensors, ctx.tanh)
    return dx, sum_rows(dx) if ctx.needs_input_grad[1] else None, None
