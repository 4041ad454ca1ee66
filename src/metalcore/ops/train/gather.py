# SPDX-License-Identifier: MIT
"""Values picked by index along one dimension, and their gradient: sums of values by index.

Inside, tensors are [outer, size, inner] with the dimension in the middle:
    gather        y[o, k, i] = x[o, index[o, k, i], i]
    index_select  y[o, k, i] = x[o, index[k], i]
    scatter_add   y[o, index[o, k, i], i] += src[o, k, i], in the order of k
"""

from typing import Any

import torch
from torch import Tensor

from metalcore._check import (
    expect,
    expect_float,
    expect_same_device,
    expect_same_dtype,
    expect_tensors,
    refuse,
    shape,
)
from metalcore._op import Example, Op, accumulate
from metalcore._route import Values

_gather_route = Values(
    "gather", "", lambda x: (x, 0, torch.arange(x.numel()).flip(0)), torch_rounds="gradients"
)
_select_route = Values(
    "index_select",
    "",
    lambda x: (x.view(-1, 64), 0, torch.arange(x.numel() // 64).flip(0)),
    torch_rounds="gradients",
)
_scatter_route = Values(
    "scatter_add",
    "",
    lambda x: (x, 0, torch.arange(x.numel()).flip(0), x.flip(0)),
    torch_rounds="all",
)

_gather = Op("gather(Tensor x, Tensor index) -> Tensor", sharding="oNi, oki -> oki")
_select = Op("index_select(Tensor x, Tensor index) -> Tensor", sharding="oNi, k -> oki")
_scatter_add = Op(
    "scatter_add(Tensor x, Tensor index, Tensor src) -> Tensor", sharding="oNi, oKi, oKi -> oNi"
)


def gather(input: Tensor, dim: int, index: Tensor) -> Tensor:
    """Values of `input` at `index` along `dim`, equal to `torch.gather`.

    Args:
        input: values, of any shape.
        dim: the dimension to pick along.
        index: int64, of as many dimensions as `input`, and in all but `dim` no larger.

    Returns:
        A tensor of the shape of `index`.

    Example:
        >>> y = metalcore.gather(torch.randn(4, 10), 1, torch.randint(10, (4, 3)))
    """
    expect_tensors("gather", input=input, index=index)
    if not input.is_floating_point() or _gather_route.prefers_torch(input):
        return _gather_route.by_torch(torch.gather, input, dim, index)
    dim = _expect("gather", dim, index, input=input)
    x, flat = _narrow(input, dim, index), _middle(index, dim)
    y: Tensor = _gather(_middle(x, dim), flat)
    return y.view(index.shape)


def index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:
    """Slices of `input` at `index` along `dim`, equal to `torch.index_select`.

    Args:
        input: values, of any shape.
        dim: the dimension to pick along.
        index: int64 or int32, [count].

    Returns:
        `input`'s shape with `count` in the place of `dim`.

    Example:
        >>> y = metalcore.index_select(torch.randn(100, 8), 0, torch.tensor([3, 3, 7]))
    """
    op = "index_select"
    expect_tensors(op, input=input, index=index)
    if not input.is_floating_point() or _select_route.prefers_torch(input):
        return _select_route.by_torch(torch.index_select, input, dim, index)
    expect_float(op, input=input)
    expect_same_device(op, input=input, index=index)
    if index.dim() > 1:
        refuse(op, f"index must have one dimension, got {shape(index)}")
    expect(input.dim() > 0, op, "input must have a dimension, got []")
    dim = dim % input.dim()
    y: Tensor = _select(_middle(input, dim), index.reshape(-1).long())
    return y.view(*input.shape[:dim], index.numel(), *input.shape[dim + 1 :])


def scatter_add(input: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """`input` with the values of `src` added at `index` along `dim`, equal to `torch.scatter_add`.

    Values meet in the order of `src`, in float32, and are rounded once: the result is the same
    each time, on every device.

    Args:
        input: what is added to, of any shape.
        dim: the dimension that `index` goes along.
        index: int64, in all but `dim` no larger than `input`, and nowhere larger than `src`.
        src: the values, in the dtype of `input`.

    Returns:
        A new tensor of the shape of `input`.

    Example:
        >>> counts = metalcore.scatter_add(torch.zeros(5), 0, torch.tensor([1, 1]), torch.ones(2))
    """
    expect_tensors("scatter_add", input=input, index=index, src=src)
    if not input.is_floating_point() or _scatter_route.prefers_torch(input, src):
        return _scatter_route.by_torch(torch.scatter_add, input, dim, index, src)
    dim = _expect("scatter_add", dim, index, input=input, src=src)
    expect_same_dtype("scatter_add", input=input, src=src)
    src = src[tuple(slice(n) for n in index.shape)]
    x = _narrow(input, dim, index)
    y: Tensor = _scatter_add(_middle(x, dim), _middle(index, dim), _middle(src, dim)).view(x.shape)
    if x.shape == input.shape:
        return y
    # what lies outside of the index stays as it is
    whole = input.clone()
    whole[tuple(slice(n) for n in x.shape)] = y
    return whole


def _expect(op: str, dim: int, index: Tensor, **tensors: Tensor) -> int:
    expect_float(op, **tensors)
    expect_same_device(op, index=index, **tensors)
    if index.dtype != torch.int64:
        raise TypeError(f"{op}: index must be int64, got {index.dtype}; convert it with .long()")
    for name, x in tensors.items():
        is_inside = x.dim() == index.dim() > 0 and all(
            a <= b or (d == dim % x.dim() and name == "input")
            for d, (a, b) in enumerate(zip(index.shape, x.shape, strict=True))
        )
        if not is_inside:
            refuse(
                op,
                f"index must have the dimensions of {name} and be no larger outside of dim {dim}; "
                f"got index {shape(index)} and {name} {shape(x)}",
            )
    return dim % index.dim()


def _narrow(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """`x` cut to the sizes of `index` in all dimensions but `dim`."""
    sizes = [x.shape[d] if d == dim else n for d, n in enumerate(index.shape)]
    return x if list(x.shape) == sizes else x[tuple(slice(n) for n in sizes)]


def _middle(x: Tensor, dim: int) -> Tensor:
    """`x` as [outer, size, inner]."""
    outer, inner = x.shape[:dim].numel(), x.shape[dim + 1 :].numel()
    return x.reshape(outer, x.shape[dim], inner)


@_gather.reference
def _(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index)


@_select.reference
def _(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(1, index)


@_scatter_add.reference
def _(x: Tensor, index: Tensor, src: Tensor) -> Tensor:
    return accumulate(x).scatter_add(1, index, accumulate(src)).to(x.dtype)


@_gather.example
def _(dtype: torch.dtype) -> Example:
    return Example((torch.randn(3, 20, 7).to(dtype), torch.randint(20, (3, 9, 7))), reduces_over=1)


@_select.example
def _(dtype: torch.dtype) -> Example:
    return Example((torch.randn(3, 20, 8).to(dtype), torch.randint(20, (9,))), reduces_over=1)


@_scatter_add.example
def _(dtype: torch.dtype) -> Example:
    x, src = torch.randn(3, 20, 7).to(dtype), torch.randn(3, 90, 7).to(dtype)
    return Example((x, torch.randint(20, (3, 90, 7)), src), reduces_over=90)


def _save_index(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.shape = inputs[0].shape


@_gather.gradient(save=_save_index)
def _(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    (index,) = ctx.saved_tensors
    return _scatter_add(dy.new_zeros(ctx.shape), index, dy), None


@_select.gradient(save=_save_index)
def _(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    (index,) = ctx.saved_tensors
    return _scatter_add(dy.new_zeros(ctx.shape), index[None, :, None].expand_as(dy), dy), None


@_scatter_add.gradient(save=_save_index)
def _(ctx: Any, dy: Tensor) -> tuple[Tensor, None, Tensor]:
    (index,) = ctx.saved_tensors
    return dy, None, _gather(dy, index)
