# SPDX-License-Identifier: MIT
"""Residual add and RMSNorm in one pass: sum = x + residual, y = rms_norm(sum)."""

from typing import Any

import torch
from torch import Tensor

from metalcore._check import expect_sum_of_rows, may_be_differentiated
from metalcore._op import Example, Op, accumulate
from metalcore.ops.train.rms_norm import gradient_of_norm, normalise, resolve_eps

_forward = Op(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset)"
    " -> (Tensor y, Tensor sum, Tensor rstd)",
    sharding="*N, *N, N -> *N, *N, *",
)
_in_place = Op(
    "add_rms_norm_(Tensor x, Tensor(a!) residual, Tensor? weight, float eps, float weight_offset)"
    " -> (Tensor y, Tensor rstd)",
    sharding="*N, *N, N -> *N, *",
)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Add `x` to the residual stream and normalise the sum, reading and writing each value once.

    Args:
        x, residual: [..., n], of one shape and dtype.
        weight, eps, weight_offset: as for `rms_norm`.

    Returns:
        y, the normalised sum, and the sum itself, both [..., n].

    Example:
        >>> hidden, residual = metalcore.add_rms_norm(attention_output, residual, weight, 1e-6)
    """
    expect_sum_of_rows("add_rms_norm", x, residual, weight=weight)
    eps = resolve_eps("add_rms_norm", x, eps)
    y, total, _ = _forward(x, residual, weight, eps, float(weight_offset))
    return y, total


def fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor | None, eps: float | None = 1e-6
) -> tuple[Tensor, Tensor]:
    """Like `add_rms_norm`, but updates `residual` in place.

    Where a gradient is recorded the sum is kept apart for the backward pass, so that later layers
    may update the residual again; without one, everything is a single pass.

    Args:
        input, residual: [..., n], of one shape and dtype; `residual` becomes their sum.
        weight: [n], or None.
        eps: added to the mean square; None for the machine epsilon of the accumulation type.

    Returns:
        The normalised sum [..., n], and the reciprocal root mean square of each row [...].

    Example:
        >>> hidden, rstd = metalcore.fused_add_rmsnorm(attention_output, residual, weight)
    """
    op = "fused_add_rmsnorm"
    expect_sum_of_rows(op, input, residual, weight=weight)
    args = (input, residual, weight, resolve_eps(op, input, eps), 0.0)
    if may_be_differentiated(input, residual, weight) or not residual.is_contiguous():
        y, total, rstd = _forward(*args)
        residual.copy_(total)
    else:
        y, rstd = _in_place(*args)
    return y, rstd


@_forward.reference
def _(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    total = (accumulate(x) + accumulate(residual)).to(
        x.dtype, memory_format=torch.contiguous_format
    )
    y, rstd = normalise(total, weight, eps, weight_offset)
    return y, total, rstd


@_in_place.reference
def _(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor]:
    y, total, rstd = _forward.meaning(x, residual, weight, eps, weight_offset)
    residual.copy_(total)
    return y, rstd


@_forward.example
@_in_place.example
def _(dtype: torch.dtype) -> Example:
    x, residual = torch.randn(5, 1000).to(dtype), torch.randn(5, 1000).to(dtype)
    return Example((x, residual, torch.randn(1000).to(dtype), 1e-6, 0.0), reduces_over=1000)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, _, ctx.weight_offset = inputs
    _, total, rstd = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(total, weight, rstd)


@_forward.gradient(save=_save)
def _(ctx: Any, dy: Tensor | None, dsum: Tensor | None, drstd: Tensor | None) -> Any:
    total, weight, rstd = ctx.saved_tensors
    d, dweight = gradient_of_norm(
        dy, total, weight, rstd, ctx.weight_offset, dsum, drstd, ctx.needs_input_grad[2]
    )
    return d, d, dweight, None, None
