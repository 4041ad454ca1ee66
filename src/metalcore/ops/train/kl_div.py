# SPDX-License-Identifier: MIT
"""Kullback-Leibler divergence: p (log p - input), where input is log q."""

import torch
from torch import Tensor

from metalcore._op import Example, Op, accumulate
from metalcore.ops.train._divergence import (
    Slopes,
    attach_gradient,
    letters,
    letters_of_gradient,
    reduced,
    reduction_of,
    times_slopes,
)
from metalcore.ops.train._elementwise import as_common

_forward = Op(
    "kl_div(Tensor input, Tensor target, bool log_target, bool reduce, float scale) -> Tensor",
    sharding=letters,
)
_backward = Op(
    "kl_div_backward(Tensor dloss, Tensor input, Tensor target, bool log_target, bool reduce,"
    " float scale, bool need_dtarget) -> (Tensor dinput, Tensor dtarget)",
    sharding=letters_of_gradient,
)


def kl_div(
    input: Tensor, target: Tensor, reduction: str = "mean", log_target: bool = False
) -> Tensor:
    """Kullback-Leibler divergence, equal to `torch.nn.functional.kl_div`.

    Args:
        input: log probabilities, log q.
        target: probabilities p, or their logarithms with `log_target`.
        reduction: "mean" (over all values), "batchmean" (over the first dimension), "sum", "none".
        log_target: whether `target` is log p.

    Returns:
        The loss, a scalar or of the common shape, in the common dtype. Sums are kept in float32
        (float64 for float64).

    Example:
        >>> loss = metalcore.kl_div(student.log_softmax(-1), teacher.softmax(-1), "batchmean")
    """
    x, t = as_common("kl_div", input=input, target=target)
    reduce, scale = reduction_of("kl_div", x, reduction, x.shape[0] if x.dim() else 1)
    total: Tensor = _forward(x, t, log_target, reduce, scale)
    return total.to(x.dtype)


def _value(x: Tensor, t: Tensor, log_target: bool) -> Tensor:
    return torch.exp(t) * (t - x) if log_target else torch.xlogy(t, t) - t * x


def _slopes(x: Tensor, t: Tensor, log_target: bool) -> Slopes:
    if log_target:
        p = torch.exp(t)
        return -p, p * (t - x + 1)
    return -t, torch.where(t == 0, 0, torch.log(t) + 1 - x)


@_forward.reference
def _(input: Tensor, target: Tensor, log_target: bool, reduce: bool, scale: float) -> Tensor:
    values = _value(accumulate(input), accumulate(target), log_target)
    return reduced(values, input, reduce, scale)


@_backward.reference
def _(
    dloss: Tensor,
    input: Tensor,
    target: Tensor,
    log_target: bool,
    reduce: bool,
    scale: float,
    need_dtarget: bool,
) -> tuple[Tensor, Tensor]:
    slopes = _slopes(accumulate(input), accumulate(target), log_target)
    return times_slopes(dloss, input, slopes, scale, need_dtarget)


attach_gradient(_forward, _backward)


@_forward.example
def _(dtype: torch.dtype) -> Example:
    x, t = (torch.randn(5, 1000).log_softmax(-1).to(dtype) for _ in range(2))
    return Example((x, t, True, True, 0.2), reduces_over=5000)


@_forward.example
def _(dtype: torch.dtype) -> Example:
    x, t = (torch.randn(5, 40).log_softmax(-1).to(dtype) for _ in range(2))
    return Example((x, t, True, False, 1.0), reduces_over=1)


@_backward.example
def _(dtype: torch.dtype) -> Example:
    x, p = torch.randn(5, 1000).log_softmax(-1).to(dtype), torch.rand(5, 1000).to(dtype)
    return Example((torch.randn(5, 1000).to(dtype), x, p, False, False, 1.0, True), reduces_over=1)
