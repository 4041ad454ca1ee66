# SPDX-License-Identifier: MIT
"""What elementwise functions share: arguments as their ops take them, results as torch lays out."""

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from metalcore._check import (
    expect_broadcast,
    expect_float,
    expect_same_device,
    expect_shape,
    expect_suffix,
)


def as_common(op: str, **tensors: Tensor) -> tuple[Tensor, ...]:
    """Check, and bring to one dtype and one shape, as torch's operators do."""
    expect_float(op, **tensors)
    expect_same_device(op, **tensors)
    values = tuple(tensors.values())
    first = values[0]
    if any(t.dtype != first.dtype for t in values):
        dtype = reduce(torch.promote_types, (t.dtype for t in values))
        values = tuple(t.to(dtype) for t in values)
    if any(t.shape != first.shape for t in values):
        expect_broadcast(op, **tensors)
        values = torch.broadcast_tensors(*values)
    return values


def as_contiguous(dtype: torch.dtype, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both as an op returns them."""
    contiguous = torch.contiguous_format
    return a.to(dtype, memory_format=contiguous), b.to(dtype, memory_format=contiguous)


def in_memory_order(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`function(*tensors)` on dimensions in the order of the first one's memory.

    Ops read and write contiguous tensors. So a tensor that is contiguous but for the order of its
    dimensions (channels last, a transpose) is not copied, and the result has the same order.
    """
    x = tensors[0]
    if not x.is_contiguous():
        order = sorted(range(x.dim()), key=x.stride, reverse=True)
        if x.permute(order).is_contiguous():
            back = [order.index(d) for d in range(x.dim())]
            return function(*(t.permute(order) for t in tensors)).permute(back)
    return function(*tensors)


def with_bias(op: str, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Check [..., n] and [n], and bring them to one dtype."""
    expect_float(op, x=x, bias=bias)
    expect_same_device(op, x=x, bias=bias)
    expect_suffix(op, x, "bias", bias.shape[-1:])
    expect_shape(op, "bias", bias, x.shape[-1:])
    if x.dtype is bias.dtype:
        return x, bias
    dtype = torch.promote_types(x.dtype, bias.dtype)
    return x.to(dtype), bias.to(dtype)


def sum_rows(x: Tensor) -> Tensor:
    """[n], the sum of [..., n] over its rows."""
    return x.flatten(0, -2).sum(0) if x.dim() > 1 else x
