# SPDX-License-Identifier: MIT
"""SwiGLU: y = silu(gate) * up."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metalcore._op import Example, Op, accumulate
from metalcore.ops.train._elementwise import as_common, as_contiguous, in_memory_order
from metalcore.ops.train.silu import silu_slope

_forward = Op("swiglu(Tensor gate, Tensor up) -> Tensor", batched=True, sharding="*, * -> *")
_backward = Op(
    "swiglu_backward(Tensor dy, Tensor gate, Tensor up) -> (Tensor dgate, Tensor dup)",
    batched=True,
    sharding="*, *, * -> *, *",
)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up` in one pass; the backward pass recomputes what it needs from the inputs.

    Args:
        gate, up: of shapes that broadcast together; of different dtypes, the wider one is taken.

    Returns:
        The product, in the common shape and dtype. Computed in float32 (float64 for float64).

    Example:
        >>> hidden = metalcore.swiglu(gate_proj(x), up_proj(x))
    """
    return in_memory_order(_forward, *as_common("swiglu", gate=gate, up=up))


def swiglu_bwd(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `swiglu(gate, up)`, for training loops that call them by hand.

    Args:
        dy: gradient of the result.
        gate, up: the inputs of the forward pass. All three are of one shape.

    Returns:
        The gradients of gate and of up.

    Example:
        >>> dgate, dup = metalcore.swiglu_bwd(dy, gate, up)
    """
    dgate, dup = _backward(*as_common("swiglu_bwd", dy=dy, gate=gate, up=up))
    return dgate, dup


@_forward.reference
def _(gate: Tensor, up: Tensor) -> Tensor:
    y = F.silu(accumulate(gate)) * accumulate(up)
    return y.to(gate.dtype, memory_format=torch.contiguous_format)


@_backward.reference
def _(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    g, d = accumulate(gate), accumulate(dy)
    return as_contiguous(gate.dtype, d * accumulate(up) * silu_slope(g), d * F.silu(g))


_backward.differentiate_reference()


@_forward.example
def _(dtype: torch.dtype) -> Example:
    return Example((torch.randn(5, 1000).to(dtype), torch.randn(5, 1000).to(dtype)), 1)


@_backward.example
def _(dtype: torch.dtype) -> Example:
    return Example(tuple(torch.randn(5, 1000).to(dtype) for _ in range(3)), 1)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


@_forward.gradient(save=_save)
def _(ctx: Any, dy: Tensor) -> Any:
    return _backward(dy, *ctx.saved_tensors)
