# SPDX-License-Identifier: MIT
"""LayerNorm: y = (x - mean) * rstd * weight + bias, rstd = 1 / sqrt(variance + eps)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from metalcore._autocast import to_normalise
from metalcore._check import (
    expect_float,
    expect_float_or_none,
    expect_positive,
    expect_same_device,
    expect_shape,
    expect_suffix,
)
from metalcore._op import Example, Op, accumulate, accumulate_dtype
from metalcore._route import Rows

_route = Rows("layer_norm", "", lambda x: (x, x.shape[-1:], x[0], x[0]), torch_rounds="gradients")

_forward = Op(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps)"
    " -> (Tensor y, Tensor mean, Tensor rstd)",
    sharding="*N, N, N -> *N, *, *",
)
backward = Op(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean,"
    " Tensor rstd, Tensor? dsum, bool need_dweight, bool need_dbias)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)",
    sharding="*N, *N, N, N, *, *, *N -> *N, N, N",
)


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer normalisation, equal to `torch.nn.functional.layer_norm`.

    Args:
        x: input, float32, float64, float16 or bfloat16.
        normalized_shape: the last dimensions of `x`, over which mean and variance are taken.
        weight, bias: scale and shift of that shape, or None.
        eps: added to the variance.

    Returns:
        The shape and dtype of `x`. Sums are kept in float32 (float64 for float64).

    Example:
        >>> y = metalcore.layer_norm(torch.randn(2, 5, 1025), (1025,), torch.ones(1025))
    """
    _expect("layer_norm", x, normalized_shape, weight, bias)
    expect_positive("layer_norm", eps=eps)
    x = to_normalise(x)
    rows = x.flatten(-len(normalized_shape))
    if _route.prefers_torch(rows, weight, bias):
        return _route.by_torch(torch.layer_norm, x, normalized_shape, weight, bias, eps)
    flat = [None if t is None else t.flatten() for t in (weight, bias)]
    y: Tensor = _forward(rows, *flat, eps)[0]
    return y if rows is x else y.view(x.shape)


def _expect(
    op: str, x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None
) -> None:
    expect_float(op, x=x)
    expect_float_or_none(op, weight=weight, bias=bias)
    expect_same_device(op, x=x, weight=weight, bias=bias)
    expect_suffix(op, x, "normalized_shape", normalized_shape)
    expect_shape(op, "weight", weight, normalized_shape)
    expect_shape(op, "bias", bias, normalized_shape)


@_forward.reference
def normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What layer_norm means, in plain torch: y, mean and rstd."""
    a = accumulate(x)
    mean = a.mean(-1)
    centered = a - mean[..., None]
    rstd = torch.rsqrt(centered.square().mean(-1) + eps)
    y = centered * rstd[..., None]
    if weight is not None:
        y = y * accumulate(weight).to(a.dtype)
    if bias is not None:
        y = y + accumulate(bias).to(a.dtype)
    return y.to(x.dtype, memory_format=torch.contiguous_format), mean, rstd


@backward.reference
def _(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dsum: Tensor | None,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    d = accumulate(dy)
    v = (accumulate(x) - mean[..., None]) * rstd[..., None]
    g = d if weight is None else d * accumulate(weight).to(d.dtype)
    dx = (g - g.mean(-1, keepdim=True) - v * (g * v).mean(-1, keepdim=True)) * rstd[..., None]
    if dsum is not None:
        dx = dx + accumulate(dsum)
    dweight, dbias = dy.new_empty(0), dy.new_empty(0)
    leading = list(range(x.dim() - 1))
    if weight is not None and need_dweight:
        dweight = ((d * v).sum(leading) if leading else d * v).to(weight.dtype)
    if bias is not None and need_dbias:
        dbias = (d.sum(leading) if leading else d.clone()).to(bias.dtype)
    return dx.to(x.dtype, memory_format=torch.contiguous_format), dweight, dbias


backward.differentiate_reference()


@_forward.example
def _(dtype: torch.dtype) -> Example:
    x, weight, bias = (torch.randn(s).to(dtype) for s in ((5, 1000), 1000, 1000))
    return Example((x, weight, bias, 1e-5), reduces_over=1000)


@backward.example
def _(dtype: torch.dtype) -> Example:
    x, weight = torch.randn(5, 1000).to(dtype), torch.randn(1000).to(dtype)
    mean = torch.randn(5).to(accumulate_dtype(x)) / 9
    rstd = (torch.rand(5) + 0.5).to(accumulate_dtype(x))
    return Example((x.flip(1), x, weight, weight, mean, rstd, None, True, True), reduces_over=1000)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, bias, *output[1:])


@_forward.gradient(save=_save)
def _(ctx: Any, dy: Tensor | None, dmean: Tensor | None, drstd: Tensor | None) -> Any:
    x, weight, bias, mean, rstd = ctx.saved_tensors
    _, *needs, _ = ctx.needs_input_grad
    grads = gradient_of_norm(dy, x, weight, bias, mean, rstd, None, dmean, drstd, *needs)
    return (*grads, None)


def gradient_of_norm(
    dy: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dsum: Tensor | None,
    dmean: Tensor | None,
    drstd: Tensor | None,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weight and bias from those of y, of x itself (dsum), of mean and of rstd."""
    dx, dweight, dbias = dsum, None, None
    if dy is not None:
        dx, dweight, dbias = backward(
            dy, x, weight, bias, mean, rstd, dsum, need_dweight, need_dbias
        )
    for more in (
        None if dmean is None else (dmean / x.shape[-1])[..., None].expand(x.shape),
        None
        if drstd is None
        else (accumulate(x) - mean[..., None]) * (drstd * rstd**3 / -x.shape[-1])[..., None],
    ):
        if more is not None:
            dx = (more if dx is None else dx + more).to(x.dtype)
    return (
        dx,
        dweight if weight is not None and need_dweight else None,
        dbias if bias is not None and need_dbias else None,
    )
