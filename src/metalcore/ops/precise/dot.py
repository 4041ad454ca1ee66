# SPDX-License-Identifier: MIT
"""Dot products and norms that lose less than their dtype, or nothing."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from metalcore._check import expect_broadcast, expect_float, expect_same_device, expect_same_dtype
from metalcore._op import Example, Op
from metalcore.ops.precise._levels import LEVELS, as_rows, kept_dims, level_number, widest

_forward = Op(
    "precise_dot(Tensor x, Tensor y, int level, bool root) -> Tensor",
    batched=True,
    sharding="*N, *N -> *",
)


def dot(
    x: Tensor,
    y: Tensor,
    dim: int | Sequence[int] | None = -1,
    keepdim: bool = False,
    *,
    level: str = "compensated",
) -> Tensor:
    """The sum of `x * y` over `dim`, without the error of the products, and with less or none of
    the additions.

    Args:
        x, y: shapes that broadcast together, of one dtype.
        dim: the dimensions to add up; all of them where it is None.
        keepdim: leave them as dimensions of one.
        level: as of `sum`; `"exact"` is the nearest number to the true sum of the true products.

    Returns:
        In the dtype of `x`.

    Example:
        >>> x, y = torch.tensor([1e20, 1.0, -1e20]), torch.tensor([1e20, 2.0, 1e20])
        >>> metalcore.precise.dot(x, y, level="exact")
        tensor(2.)
    """
    expect_float("dot", x=x, y=y)
    expect_same_device("dot", x=x, y=y)
    expect_same_dtype("dot", x=x, y=y)
    expect_broadcast("dot", x=x, y=y)
    x, y = torch.broadcast_tensors(x, y)
    number = level_number("dot", level, x)
    rows, dims = as_rows("dot", x, dim)
    return kept_dims(_forward(rows, as_rows("dot", y, dim)[0], number, False), dims, keepdim)


def norm(
    x: Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    level: str = "compensated",
) -> Tensor:
    """The Euclidean norm of `x` over `dim`, as `torch.linalg.vector_norm`, with less or no error.

    Args:
        x: any shape, float32, float64, float16 or bfloat16.
        dim: the dimensions to add up; all of them where none is given.
        keepdim: leave them as dimensions of one.
        level: as of `sum`; `"exact"` is the nearest number to the true norm, which overflows only
            if the norm does, and not if its square does.

    Returns:
        In the dtype of `x`. The gradient at zero is zero.

    Example:
        >>> metalcore.precise.norm(torch.tensor([3e30, 4e30]), level="exact")
        tensor(5.0000e+30)
    """
    expect_float("norm", x=x)
    number = level_number("norm", level, x)
    rows, dims = as_rows("norm", x, dim)
    return kept_dims(_forward(rows, rows, number, True), dims, keepdim)


@_forward.reference
def _(x: Tensor, y: Tensor, level: int, root: bool) -> Tensor:
    total = (widest(x) * widest(y)).sum(-1)
    return (total.sqrt() if root else total).to(x.dtype)


def _example(level: str, n: int, root: bool) -> None:
    @_forward.example
    def _(dtype: torch.dtype) -> Example:
        x = torch.randn(5, n).to(dtype)
        # of a root, they must have a positive product
        y = x.abs() + 0.5 if not root else x + x.sign() / 2
        return Example((x, y, LEVELS.index(level), root), reduces_over=n)


for _level in ("exact", "compensated"):
    _example(_level, 1000, False)
_example("exact", 33, True)
_example("compensated", 33, True)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, y, _, ctx.root = inputs
    ctx.save_for_backward(x, y, output)


@_forward.gradient(save=_save)
def _(ctx: Any, dz: Tensor) -> Any:
    x, y, z = ctx.saved_tensors
    if ctx.root:
        dz = torch.where(z == 0, 0, dz / (2 * torch.where(z == 0, 1, z)))
    return dz[..., None] * y, dz[..., None] * x, None, None
