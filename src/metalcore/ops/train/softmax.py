# SPDX-License-Identifier: MIT
"""Softmax of scale * x + mask over one dimension."""

from typing import Any

import torch
from torch import Tensor

from metalcore._autocast import to_normalise
from metalcore._check import (
    expect_broadcast_to,
    expect_dim,
    expect_float,
    expect_rank,
    expect_same_device,
)
from metalcore._op import Example, Op, accumulate
from metalcore._route import Rows, Values

_route = Rows("softmax")
# Over another dimension than the last, which our kernels need copies for.
_route_across = Values("softmax", "across", lambda x: (x.view(8, -1), 0))

_forward = Op(
    "softmax(Tensor x, Tensor? mask, float scale, bool causal) -> Tensor",
    sharding=lambda x, mask, scale, causal: "*MN, *MN -> *MN" if causal else "*N, *N -> *N",
)
_backward = Op(
    "softmax_backward(Tensor dy, Tensor y, float scale) -> Tensor",
    batched=True,
    sharding="*N, *N -> *N",
)


def softmax(
    x: Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    causal: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Softmax of `scale * x + mask` over `dim`; plain, it equals `torch.softmax`.

    Args:
        x: any shape, float32, float64, float16 or bfloat16.
        dim: the dimension that sums to one.
        scale: factor of `x`.
        mask: broadcastable to `x`: numbers to add, or booleans that are True where `x` takes part,
            as in `scaled_dot_product_attention`. Rows of which no element takes part are NaN.
        causal: element j of row i takes part where j <= i; rows are the dimension before the last,
            and `dim` the last.
        dtype: convert `x` to it first, as torch does.

    Returns:
        The shape of `x`, in its dtype. Sums are kept in float32 (float64 for float64).

    Example:
        >>> weights = metalcore.softmax(q @ k.mT, scale=64**-0.5, causal=True)
    """
    if dtype is not None:
        x = x.to(dtype)
    expect_float("softmax", x=x)
    expect_rank("softmax", x, 2 if causal else 0)
    expect_dim("softmax", x, dim, last=causal)
    x = to_normalise(x)
    if x.dim() == 0:
        return softmax(x[None], scale=scale, mask=mask)[0]
    is_last = dim in (-1, x.dim() - 1)
    if mask is None and scale == 1.0 and not causal:
        route = _route if is_last else _route_across
        if route.prefers_torch(x):
            return route.by_torch(torch.softmax, x, dim)
    rows = x if is_last else x.movedim(dim, -1)
    if mask is not None:
        mask, wide = _as_numbers(mask, x)
        # rows may share a mask, but their values may not
        shared = mask.expand(*mask.shape[:-1], x.shape[-1])
        mask = shared if is_last else mask.expand(x.shape).movedim(dim, -1)
        rows = rows.to(wide)
    y: Tensor = _forward(rows, mask, float(scale), causal)
    if mask is not None:
        y = y.to(x.dtype)
    return y if is_last else y.movedim(-1, dim).contiguous()


def _as_numbers(mask: Tensor, x: Tensor) -> tuple[Tensor, torch.dtype]:
    """The mask as numbers to add, and the dtype that both are to be in."""
    expect_same_device("softmax", x=x, mask=mask)
    expect_broadcast_to("softmax", "mask", mask, x)
    if mask.dtype == torch.bool:
        zeros = torch.zeros_like(mask, dtype=x.dtype, memory_format=torch.contiguous_format)
        return zeros.masked_fill(~mask, -torch.inf), x.dtype
    expect_float("softmax", mask=mask)
    wide = torch.promote_types(mask.dtype, x.dtype)
    return mask.to(wide).reshape(mask.shape or (1,)), wide


@_forward.reference
def _(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    a = accumulate(x) * scale
    if mask is not None:
        a = a + accumulate(mask)
    if causal:
        hidden = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        a = a.masked_fill(hidden, -torch.inf)
    return torch.softmax(a, -1).to(x.dtype, memory_format=torch.contiguous_format)


@_backward.reference
def _(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    d, p = accumulate(dy), accumulate(y)
    dx = p * (d - (d * p).sum(-1, keepdim=True)) * scale
    return dx.to(y.dtype, memory_format=torch.contiguous_format)


_backward.differentiate_reference()


@_forward.example
def _(dtype: torch.dtype) -> Example:
    x, mask = torch.randn(5, 1000).to(dtype), torch.randn(1000).to(dtype)
    return Example((x, mask, 0.5, False), reduces_over=1000)


@_backward.example
def _(dtype: torch.dtype) -> Example:
    y = torch.softmax(torch.randn(5, 1000), -1).to(dtype)
    return Example((torch.randn(5, 1000).to(dtype), y, 0.5), reduces_over=1000)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, mask, ctx.scale, _ = inputs
    ctx.mask = None if mask is None else (mask.shape, mask.dtype)
    ctx.save_for_backward(output)


@_forward.gradient(save=_save)
def _(ctx: Any, dy: Tensor) -> Any:
    (y,) = ctx.saved_tensors
    if not ctx.needs_input_grad[1]:
        return _backward(dy, y, ctx.scale), None, None, None
    # the gradient of scale * x + mask
    d = _backward(dy, y, 1.0)
    shape, dtype = ctx.mask
    return d * ctx.scale, d.sum_to_size(shape).to(dtype), None, None
