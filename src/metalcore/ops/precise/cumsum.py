# SPDX-License-Identifier: MIT
"""Running sums that lose less than their dtype, or nothing."""

from typing import Any

import torch
from torch import Tensor

from metalcore._check import expect_dim, expect_float
from metalcore._op import Example, Op
from metalcore.ops.precise._levels import LEVELS, level_number, widest

_forward = Op("precise_cumsum(Tensor x, int level) -> Tensor", batched=True, sharding="*N -> *N")


def cumsum(x: Tensor, dim: int = -1, *, level: str = "compensated") -> Tensor:
    """The sums of `x` along `dim` up to each element, as `torch.cumsum`, with less or no error.

    Args:
        x: any shape, float32, float64, float16 or bfloat16.
        dim: the dimension to go along.
        level: as of `sum`; with `"exact"`, each element is the nearest number to its true sum.

    Returns:
        The shape and dtype of `x`.

    Example:
        >>> metalcore.precise.cumsum(torch.tensor([1e30, 1.0, -1e30]), level="exact")
        tensor([1.0000e+30, 1.0000e+30, 1.0000e+00])
    """
    expect_float("cumsum", x=x)
    expect_dim("cumsum", x, dim)
    number = level_number("cumsum", level, x)
    if x.dim() == 0:
        return _forward(x[None], number)[0]  # type: ignore[no-any-return]
    y: Tensor = _forward(x.movedim(dim, -1), number)
    return y if dim in (-1, x.dim() - 1) else y.movedim(-1, dim).contiguous()


@_forward.reference
def _(x: Tensor, level: int) -> Tensor:
    return widest(x).cumsum(-1).to(x.dtype, memory_format=torch.contiguous_format)


def _example(level: str, n: int) -> None:
    @_forward.example
    def _(dtype: torch.dtype) -> Example:
        return Example((torch.randn(5, n).to(dtype), LEVELS.index(level)), reduces_over=n)


_example("exact", 300)
_example("compensated", 1000)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.level = inputs[1]


@_forward.gradient(save=_save)
def _(ctx: Any, dy: Tensor) -> Any:
    return _forward(dy.flip(-1), ctx.level).flip(-1), None
