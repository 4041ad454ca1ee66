# SPDX-License-Identifier: MIT
"""RMSNorm: y = x * rstd * (weight_offset + weight), rstd = 1 / sqrt(mean(x^2) + eps)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from metalcore._check import (
    expect_float,
    expect_float_or_none,
    expect_positive,
    expect_rank,
    expect_same_device,
    expect_shape,
    expect_suffix,
)
from metalcore._op import Example, Op, accumulate, accumulate_dtype
from metalcore._route import Rows
from metalcore.ops.train._elementwise import sum_rows

_route = Rows("rms_norm", "", lambda x: (x, x[0]))

forward = Op(
    "rms_norm(Tensor x, Tensor? weight, float eps, float weight_offset) -> (Tensor y, Tensor rstd)",
    sharding="*N, N -> *N, *",
)
backward = Op(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, float weight_offset,"
    " Tensor? dsum, bool need_dweight) -> (Tensor dx, Tensor dweight)",
    sharding="*N, *N, N, *, *N -> *N, N",
)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    normalized_shape: Sequence[int] | None = None,
    weight_offset: float = 0.0,
) -> Tensor:
    """Root-mean-square normalisation, equal to `torch.nn.functional.rms_norm`.

    Args:
        x: input, [..., n], float32, float64, float16 or bfloat16.
        weight: scale, of the shape that is normalised; None for no scale.
        eps: added to the mean square; None for the machine epsilon of the accumulation type,
            as torch does.
        normalized_shape: the trailing dimensions to normalise over, where there is no weight to
            tell; default the last one.
        weight_offset: added to the weight; 1 for Gemma, which stores `weight - 1`.

    Returns:
        [..., n], in the dtype of `x`. Sums are kept in float32 (float64 for float64).

    Example:
        >>> y = metalcore.rms_norm(torch.randn(2, 5, 1025), torch.ones(1025), eps=1e-6)
    """
    rows, flat = as_rows("rms_norm", x, weight, normalized_shape)
    eps = resolve_eps("rms_norm", x, eps)
    if weight_offset == 0 and _route.prefers_torch(rows, flat):
        y = _route.by_torch(torch.rms_norm, rows, rows.shape[-1:], flat, eps)
    else:
        y = forward(rows, flat, eps, float(weight_offset))[0]
    return y if rows is x else y.view(x.shape)


class RMSNormFunction:
    """The autograd spelling of `rms_norm`: `RMSNormFunction.apply(x, weight, eps)`."""

    @staticmethod
    def apply(x: Tensor, weight: Tensor | None, eps: float | None) -> Tensor:
        return rms_norm(x, weight, eps)


def as_rows(
    op: str, x: Tensor, weight: Tensor | None, normalized_shape: Sequence[int] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Check, and flatten the normalised dimensions of `x` and `weight` into one."""
    expect_float(op, x=x)
    expect_float_or_none(op, weight=weight)
    expect_same_device(op, x=x, weight=weight)
    if normalized_shape is not None:
        expect_shape(op, "weight", weight, normalized_shape)
        expect_suffix(op, x, "normalized_shape", normalized_shape)
        rank = len(normalized_shape)
    elif weight is not None:
        expect_suffix(op, x, "weight", weight.shape)
        rank = weight.dim()
    else:
        expect_rank(op, x, 1)
        rank = 1
    if rank == 1:
        return x, weight
    return x.flatten(-rank), None if weight is None else weight.flatten()


def resolve_eps(op: str, x: Tensor, eps: float | None) -> float:
    if eps is None:
        return torch.finfo(accumulate_dtype(x)).eps
    expect_positive(op, eps=eps)
    return eps


@forward.reference
def normalise(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor]:
    """What rms_norm means, in plain torch: y and rstd."""
    a = accumulate(x)
    rstd = torch.rsqrt(a.square().mean(-1) + eps)
    y = a * rstd[..., None]
    if weight is not None:
        y = y * (accumulate(weight).to(a.dtype) + weight_offset)
    return y.to(x.dtype, memory_format=torch.contiguous_format), rstd


@backward.reference
def _(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    weight_offset: float,
    dsum: Tensor | None,
    need_dweight: bool,
) -> tuple[Tensor, Tensor]:
    dy_ = accumulate(dy)
    normed = accumulate(x) * rstd[..., None]
    dnormed = dy_ if weight is None else dy_ * (accumulate(weight).to(dy_.dtype) + weight_offset)
    dx = (dnormed - normed * (dnormed * normed).mean(-1, keepdim=True)) * rstd[..., None]
    if dsum is not None:
        dx = dx + accumulate(dsum)
    if weight is not None and need_dweight:
        dweight = sum_rows(dy_ * normed).to(weight.dtype)
    else:
        dweight = dy.new_empty(0)
    return dx.to(x.dtype, memory_format=torch.contiguous_format), dweight


backward.differentiate_reference()


@forward.example
def _(dtype: torch.dtype) -> Example:
    x, weight = torch.randn(5, 1000).to(dtype), torch.randn(1000).to(dtype)
    return Example((x, weight, 1e-6, 0.0), reduces_over=1000)


@forward.example
def _(dtype: torch.dtype) -> Example:
    x, weight = torch.randn(8, 64).to(dtype), torch.randn(64).to(dtype)
    return Example((x, weight, 1e-6, 0.0), reduces_over=64)


@backward.example
def _(dtype: torch.dtype) -> Example:
    x, weight = torch.randn(5, 1000).to(dtype), torch.randn(1000).to(dtype)
    rstd = (torch.rand(5) + 0.5).to(accumulate_dtype(x))
    return Example((x.flip(1), x, weight, rstd, 0.0, None, True), reduces_over=1000)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, ctx.weight_offset = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, output[1])


@forward.gradient(save=_save)
def _(ctx: Any, dy: Tensor | None, drstd: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, rstd = ctx.saved_tensors
    dx, dweight = gradient_of_norm(
        dy, x, weight, rstd, ctx.weight_offset, None, drstd, ctx.needs_input_grad[1]
    )
    return dx, dweight, None, None


def gradient_of_norm(
    dy: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    weight_offset: float,
    dsum: Tensor | None,
    drstd: Tensor | None,
    need_dweight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and weight from those of y, of the sum x itself (dsum) and of rstd."""
    dx, dweight = dsum, None
    if dy is not None:
        dx, dweight = backward(dy, x, weight, rstd, weight_offset, dsum, need_dweight)
    if drstd is not None:
        through_rstd = accumulate(x) * (drstd * rstd**3 / -x.shape[-1])[..., None]
        dx = (through_rstd if dx is None else dx + through_rstd).to(x.dtype)
    return dx, dweight if weight is not None and need_dweight else None
