# SPDX-License-Identifier: MIT
"""What kl_div and jsd share: reductions, and the gradient of a sum of elementwise values."""

import math
from typing import Any

from torch import Tensor

from metalcore._check import refuse
from metalcore._op import Op, accumulate

Slopes = tuple[Tensor, Tensor]


def reduction_of(op: str, input: Tensor, reduction: str, rows: int) -> tuple[bool, float]:
    """Whether the values are added up, and what they are multiplied by."""
    counts = {"none": 1, "sum": 1, "mean": input.numel(), "batchmean": rows}
    if reduction not in counts:
        refuse(op, f"reduction must be none, sum, mean or batchmean, got {reduction}")
    count = counts[reduction]
    return reduction != "none", 1 / count if count else math.nan


def letters(input: Any, target: Any, parameter: Any, reduce: bool, scale: float) -> str:
    """What may be split over processes: all dimensions; a loss that is a sum is one over them."""
    return "*, * -> " if reduce else "*, * -> *"


def letters_of_gradient(dloss: Tensor, *_: Any) -> str:
    return "*, *, * -> *, *" if dloss.dim() else ", *, * -> *, *"


def reduced(values: Tensor, input: Tensor, reduce: bool, scale: float) -> Tensor:
    """The loss as an op returns it: in the accumulation type where it is a sum."""
    values = values * scale
    return values.sum() if reduce else values.to(input.dtype).contiguous()


def times_slopes(
    dloss: Tensor, input: Tensor, slopes: Slopes, scale: float, need_dtarget: bool
) -> tuple[Tensor, Tensor]:
    d = accumulate(dloss) * scale
    dinput, dtarget = ((d * s).to(input.dtype).contiguous() for s in slopes)
    return dinput, dtarget if need_dtarget else input.new_empty(0)


def attach_gradient(forward: Op, backward: Op) -> None:
    """The gradient of `forward(input, target, parameter, reduce, scale)` is `backward`, which is
    differentiable by its reference."""
    backward.differentiate_reference()

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, target, *ctx.how = inputs
        ctx.save_for_backward(input, target)

    @forward.gradient(save=save)
    def _(ctx: Any, dloss: Tensor) -> Any:
        need_dtarget = ctx.needs_input_grad[1]
        dinput, dtarget = backward(dloss, *ctx.saved_tensors, *ctx.how, need_dtarget)
        return dinput, dtarget if need_dtarget else None, None, None, None
