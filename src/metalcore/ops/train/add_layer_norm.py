# SPDX-License-Identifier: MIT
"""Residual add and LayerNorm in one pass: sum = x + residual, y = layer_norm(sum)."""

from typing import Any

import torch
from torch import Tensor

from metalcore._check import expect_positive, expect_sum_of_rows
from metalcore._op import Example, Op, accumulate
from metalcore._route import Rows
from metalcore.ops.train.layer_norm import gradient_of_norm, normalise

_route = Rows("add_layer_norm", "", lambda x: (x, x.flip(-1), x[0], x[0]), torch_rounds="gradients")

_forward = Op(
    "add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps)"
    " -> (Tensor y, Tensor sum, Tensor mean, Tensor rstd)",
    sharding="*N, *N, N, N -> *N, *N, *, *",
)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Add `x` to the residual stream and normalise the sum, reading and writing each value once.

    Args:
        x, residual: [..., n], of one shape and dtype.
        weight, bias: scale and shift, [n], or None.
        eps: added to the variance.

    Returns:
        y, the normalised sum, and the sum itself, both [..., n].

    Example:
        >>> hidden, residual = metalcore.add_layer_norm(attention_output, residual, weight, bias)
    """
    _expect("add_layer_norm", x, residual, weight, bias, eps)
    if _route.prefers_torch(x, residual, weight, bias):
        total = x + residual
        y = _route.by_torch(torch.layer_norm, total, x.shape[-1:], weight, bias, eps)
    else:
        y, total, _, _ = _forward(x, residual, weight, bias, eps)
    return y, total


def fused_add_layernorm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `add_layer_norm`, with the statistics of the rows in place of the sum.

    Args:
        input, residual: [..., n], of one shape and dtype.
        weight, bias: scale and shift, [n], or None.
        eps: added to the variance.

    Returns:
        The normalised sum [..., n]; mean and reciprocal standard deviation of each row [...].

    Example:
        >>> hidden, mean, rstd = metalcore.fused_add_layernorm(x, residual, weight, bias)
    """
    _expect("fused_add_layernorm", input, residual, weight, bias, eps)
    y, _, mean, rstd = _forward(input, residual, weight, bias, eps)
    return y, mean, rstd


def _expect(
    op: str, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> None:
    expect_sum_of_rows(op, x, residual, weight=weight, bias=bias)
    expect_positive(op, eps=eps)


@_forward.reference
def _(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = (accumulate(x) + accumulate(residual)).to(
        x.dtype, memory_format=torch.contiguous_format
    )
    y, mean, rstd = normalise(total, weight, bias, eps)
    return y, total, mean, rstd


@_forward.example
def _(dtype: torch.dtype) -> Example:
    sizes = ((5, 1000), (5, 1000), 1000, 1000)
    return Example((*(torch.randn(s).to(dtype) for s in sizes), 1e-5), reduces_over=1000)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, bias, _ = inputs
    _, total, mean, rstd = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(total, weight, bias, mean, rstd)


@_forward.gradient(save=_save)
def _(
    ctx: Any,
    dy: Tensor | None,
    dsum: Tensor | None,
    dmean: Tensor | None,
    drstd: Tensor | None,
) -> Any:
    _, _, *needs, _ = ctx.needs_input_grad
    total, weight, bias, mean, rstd = ctx.saved_tensors
    d, dweight, dbias = gradient_of_norm(
        dy, total, weight, bias, mean, rstd, dsum, dmean, drstd, *needs
    )
    return d, d, dweight, dbias, None
