# SPDX-License-Identifier: MIT
"""GEGLU: y = gelu(gate) * up."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metalcore._op import Example, Op, accumulate
from metalcore.ops.train._elementwise import as_common, as_contiguous, in_memory_order
from metalcore.ops.train.gelu import gelu_and_slope, is_tanh

_forward = Op(
    "geglu(Tensor gate, Tensor up, bool tanh) -> Tensor", batched=True, sharding="*, * -> *"
)
_backward = Op(
    "geglu_backward(Tensor dy, Tensor gate, Tensor up, bool tanh) -> (Tensor dgate, Tensor dup)",
    batched=True,
    sharding="*, *, * -> *, *",
)


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """`gelu(gate) * up` in one pass; the backward pass recomputes what it needs from the inputs.

    Args:
        gate, up: of shapes that broadcast together; of different dtypes, the wider one is taken.
        approximate: "none" for the exact GELU, "tanh" for the approximation, as in torch.

    Returns:
        The product, in the common shape and dtype. Computed in float32 (float64 for float64).

    Example:
        >>> hidden = metalcore.geglu(gate_proj(x), up_proj(x), approximate="tanh")
    """
    tanh = is_tanh("geglu", approximate)
    gate, up = as_common("geglu", gate=gate, up=up)
    return in_memory_order(lambda gate, up: _forward(gate, up, tanh), gate, up)


@_forward.reference
def _(gate: Tensor, up: Tensor, tanh: bool) -> Tensor:
    y = F.gelu(accumulate(gate), approximate="tanh" if tanh else "none") * accumulate(up)
    return y.to(gate.dtype, memory_format=torch.contiguous_format)


@_backward.reference
def _(dy: Tensor, gate: Tensor, up: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    d, g = accumulate(dy), accumulate(gate)
    value, slope = gelu_and_slope(g, tanh)
    return as_contiguous(gate.dtype, d * accumulate(up) * slope, d * value)


_backward.differentiate_reference()


@_forward.example
def _(dtype: torch.dtype) -> Example:
    return Example((torch.randn(5, 1000).to(dtype), torch.randn(5, 1000).to(dtype), False), 1)


@_backward.example
def _(dtype: torch.dtype) -> Example:
    return Example((*(torch.randn(5, 1000).to(dtype) for _ in range(3)), True), 1)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.tanh = inputs
    ctx.save_for_backward(*tensors)


@_forward.gradient(save=_save)
def _(ctx: Any, dy: Tensor) -> Any:
    return (*_backward(dy, *ctx.saved_tensors, ctx.tanh), None)
