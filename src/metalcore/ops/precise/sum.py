# SPDX-License-Identifier: MIT
"""Sums and means that lose less than their dtype, or nothing."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from metalcore._check import expect_float
from metalcore._op import Example, Op
from metalcore.ops.precise._levels import LEVELS, as_rows, kept_dims, level_number, widest

_forward = Op(
    "precise_sum(Tensor x, int level, bool mean) -> Tensor", batched=True, sharding="*N -> *"
)


def sum(
    x: Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    level: str = "compensated",
) -> Tensor:
    """The sum of `x` over `dim`, as `torch.sum`, but with less or no error.

    Args:
        x: any shape, float32, float64, float16 or bfloat16.
        dim: the dimensions to add up; all of them where none is given.
        keepdim: leave them as dimensions of one.
        level: `"compensated"` adds with about twice the digits of float32, of float64 for float64;
            `"exact"` is the nearest number to the true sum, bitwise the same for any order, layout,
            number of threads and device, and overflows only if the true sum does; `"float64"` adds
            in float64, on a GPU with 48 bits.

    Returns:
        In the dtype of `x`.

    Example:
        >>> metalcore.precise.sum(torch.tensor([1e30, 1.0, -1e30]), level="exact")
        tensor(1.)
    """
    return _reduced("sum", x, dim, keepdim, level, False)


def mean(
    x: Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    level: str = "compensated",
) -> Tensor:
    """The mean of `x` over `dim`, as `torch.mean`, but with less or no error.

    Args:
        x: any shape, float32, float64, float16 or bfloat16.
        dim: the dimensions to average over; all of them where none is given.
        keepdim: leave them as dimensions of one.
        level: as of `sum`; `"exact"` is the nearest number to the true mean.

    Returns:
        In the dtype of `x`.

    Example:
        >>> metalcore.precise.mean(torch.tensor([1e30, 3.0, -1e30]), level="exact")
        tensor(1.)
    """
    return _reduced("mean", x, dim, keepdim, level, True)


def _reduced(
    op: str, x: Tensor, dim: int | Sequence[int] | None, keepdim: bool, level: str, mean: bool
) -> Tensor:
    expect_float(op, x=x)
    number = level_number(op, level, x)
    rows, dims = as_rows(op, x, dim)
    return kept_dims(_forward(rows, number, mean), dims, keepdim)


@_forward.reference
def _(x: Tensor, level: int, mean: bool) -> Tensor:
    total = widest(x).mean(-1) if mean else widest(x).sum(-1)
    return total.to(x.dtype)


def _example(level: str, rows: int, n: int, mean: bool) -> None:
    @_forward.example
    def _(dtype: torch.dtype) -> Example:
        x = torch.randn(rows, n).to(dtype)
        return Example((x, LEVELS.index(level), mean), reduces_over=n)


for _level in ("exact", "compensated"):
    _example(_level, 5, 1000, False)
_example("exact", 5, 33, True)
_example("compensated", 5, 33, True)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, mean = inputs
    ctx.n, ctx.mean = x.shape[-1], mean


@_forward.gradient(save=_save)
def _(ctx: Any, dy: Tensor) -> Any:
    each = dy / ctx.n if ctx.mean else dy
    return each[..., None].expand(*dy.shape, ctx.n), None, None
