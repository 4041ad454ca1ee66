# SPDX-License-Identifier: MIT
"""Generalised Jensen-Shannon divergence of log q (input) and log p (target):

    b p (log p - log m) + (1 - b) q (log q - log m),  m = b p + (1 - b) q

and its limits p (log p - log q) for b = 0 and q (log q - log p) for b = 1.
"""

import torch
from torch import Tensor

from metalcore._accuracy import set_accuracy
from metalcore._check import refuse
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

# differences of logarithms, of which each is off by eps * |log p|
set_accuracy("jsd", 16.0)

_forward = Op(
    "jsd(Tensor input, Tensor target, float beta, bool reduce, float scale) -> Tensor",
    sharding=letters,
)
_backward = Op(
    "jsd_backward(Tensor dloss, Tensor input, Tensor target, float beta, bool reduce,"
    " float scale, bool need_dtarget) -> (Tensor dinput, Tensor dtarget)",
    sharding=letters_of_gradient,
)


def jsd(input: Tensor, target: Tensor, beta: float = 0.5, reduction: str = "batchmean") -> Tensor:
    """Generalised Jensen-Shannon divergence, for distillation.

    Args:
        input: log probabilities of the student, log q, [..., n].
        target: log probabilities of the teacher, log p, [..., n].
        beta: 0.5 for the symmetric divergence, 0 for the forward Kullback-Leibler divergence
            p (log p - log q), 1 for the reverse one. Values of probability 0 add nothing.
        reduction: "batchmean" (over all rows), "mean" (over all values), "sum", "none".

    Returns:
        The loss, a scalar or [..., n], in the common dtype. Sums are kept in float32 (float64 for
        float64).

    Example:
        >>> loss = metalcore.jsd(student.log_softmax(-1), teacher.log_softmax(-1), beta=0.1)
    """
    if not 0 <= beta <= 1:
        refuse("jsd", f"beta must be from 0 to 1, got {beta}")
    x, t = as_common("jsd", input=input, target=target)
    rows = x.shape[:-1].numel()
    reduce, scale = reduction_of("jsd", x, reduction, rows)
    loss: Tensor = _forward(x, t, float(beta), reduce, scale)
    return loss.to(x.dtype)


def _times(p: Tensor, v: Tensor) -> Tensor:
    return torch.where(p == 0, 0, p * v)


def _value(x: Tensor, y: Tensor, beta: float) -> Tensor:
    q, p = torch.exp(x), torch.exp(y)
    if beta == 0:
        return _times(p, y - x)
    if beta == 1:
        return _times(q, x - y)
    m = torch.log(beta * p + (1 - beta) * q)
    return beta * _times(p, y - m) + (1 - beta) * _times(q, x - m)


def _slopes(x: Tensor, y: Tensor, beta: float) -> Slopes:
    q, p = torch.exp(x), torch.exp(y)
    if beta == 0:
        return -p, _times(p, y - x + 1)
    if beta == 1:
        return _times(q, x - y + 1), -q
    m = torch.log(beta * p + (1 - beta) * q)
    return (1 - beta) * _times(q, x - m), beta * _times(p, y - m)


@_forward.reference
def _(input: Tensor, target: Tensor, beta: float, reduce: bool, scale: float) -> Tensor:
    return reduced(_value(accumulate(input), accumulate(target), beta), input, reduce, scale)


@_backward.reference
def _(
    dloss: Tensor,
    input: Tensor,
    target: Tensor,
    beta: float,
    reduce: bool,
    scale: float,
    need_dtarget: bool,
) -> tuple[Tensor, Tensor]:
    slopes = _slopes(accumulate(input), accumulate(target), beta)
    return times_slopes(dloss, input, slopes, scale, need_dtarget)


attach_gradient(_forward, _backward)


@_forward.example
def _(dtype: torch.dtype) -> Example:
    x, t = (torch.randn(5, 1000).log_softmax(-1).to(dtype) for _ in range(2))
    return Example((x, t, 0.3, True, 0.2), reduces_over=5000)


@_forward.example
def _(dtype: torch.dtype) -> Example:
    x, t = (torch.randn(5, 40).log_softmax(-1).to(dtype) for _ in range(2))
    return Example((x, t, 0.3, False, 1.0), reduces_over=1)


@_backward.example
def _(dtype: torch.dtype) -> Example:
    x, t, d = (torch.randn(5, 1000).log_softmax(-1).to(dtype) for _ in range(3))
    return Example((d, x, t, 0.3, False, 1.0, True), reduces_over=1)
