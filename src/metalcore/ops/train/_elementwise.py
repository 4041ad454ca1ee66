# SPDX-License-Identifier: MIT
"""What elementwise functions share: arguments as their ops take them, results as torch lays out."""

from collections.abc import Callable

import torch
from torch import Tensor

from metalcore._check import (
    FLOATS,
    expect_broadcast,
    expect_float,
    expect_same_device,
    expect_shape,
    expect_suffix,
)
from metalcore._policy import policy


def alike(op: str, **tensors: Tensor) -> tuple[Tensor, ...]:
    """Check, and bring to one dtype and one shape, as torch's operators do."""
    values = tuple(tensors.values())
    first = values[0]
    expect_float(op, **tensors)
    expect_same_device(op, **tensors)
    if any(t.dtype != first.dtype for t in values):
        dtype = torch.promote_types(values[0].dtype, values[1].dtype)
        for t in values[2:]:
            dtype = torch.promote_types(dtype, t.dtype)
        values = tuple(t.to(dtype) for t in values)
    if any(t.shape != first.shape for t in values):
        expect_broadcast(op, **tensors)
        values = torch.broadcast_tensors(*values)
    return values


def are_alike(a: Tensor, b: Tensor) -> bool:
    """Whether `alike` has nothing to do."""
    dtype = a.dtype
    return a.shape == b.shape and dtype is b.dtype and dtype in FLOATS and a.is_cpu is b.is_cpu


def small_by_dtype(op: str) -> dict[torch.dtype, int]:
    """The values below which torch is ahead: `torch_below` and `torch_below_half` of the policy."""
    knobs = policy(op, "cpu")
    return {t: knobs["torch_below_half" if t.itemsize == 2 else "torch_below"] for t in FLOATS}


def is_recorded_below(limit: int, x: Tensor, *others: Tensor) -> bool:
    """Whether x has fewer values and a gradient is recorded: torch records its own functions in
    less time, so it is ahead for larger ones too."""
    return (
        x.numel() < limit
        and torch.is_grad_enabled()
        and (x.requires_grad or any(t.requires_grad for t in others))
    )


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
    dtype = torch.promote_types(x.dtype, bias.dtype)
    return x.to(dtype), bias.to(dtype)


def are_rows_of(bias: Tensor, x: Tensor) -> bool:
    """Whether `with_bias` has nothing to do."""
    dtype, row = x.dtype, bias.shape
    return (
        x.shape[-1:] == row
        and len(row) == 1
        and dtype is bias.dtype
        and dtype in FLOATS
        and x.is_cpu is bias.is_cpu
    )


def sum_rows(x: Tensor) -> Tensor:
    """[n], the sum of [..., n] over its rows."""
    return x.flatten(0, -2).sum(0) if x.dim() > 1 else x
