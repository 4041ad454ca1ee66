# SPDX-License-Identifier: MIT
"""Causal convolution of each channel over time: y_t = sum_j w_j x_(t-K+1+j) + b, and SiLU of it."""

from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from metalcore._check import (
    expect,
    expect_float,
    expect_float_or_none,
    expect_same_device,
    expect_same_dtype,
    expect_shape,
    refuse,
    shape,
)
from metalcore._op import Example, Op, accumulate

_TAPS = "Tensor weight, Tensor? bias, Tensor? state, bool silu"


def _letters_of_backward(*args: Any) -> str:
    bias = "d" if args[4] is not None else "Z"
    return f"bTd, bKd, bTd, dK, d, bKd -> bTd, dK, {bias}, bKd"


_forward = Op(
    f"causal_conv1d(Tensor x, {_TAPS}) -> (Tensor y, Tensor last)",
    sharding="bTd, dK, d, bKd -> bTd, bKd",
)
_backward = Op(
    f"causal_conv1d_backward(Tensor dy, Tensor? dlast, Tensor x, {_TAPS})"
    " -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dstate)",
    sharding=_letters_of_backward,
)


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Literal["silu"] | None = None,
    initial_state: Tensor | None = None,
    return_last_state: Literal[False] = False,
) -> Tensor: ...


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Literal["silu"] | None = None,
    initial_state: Tensor | None = None,
    return_last_state: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Literal["silu"] | None = None,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolve each channel with its own K weights over this and the K - 1 steps before it.

    Args:
        x: input [B, T, D], float32, float64, float16 or bfloat16. (Where channels come first, as
            in `nn.Conv1d`, give `x.mT`.)
        weight: [D, K] or, as `nn.Conv1d` has it, [D, 1, K]; K from 2 to 8. The last weight meets
            the present step.
        bias: [D], or None.
        activation: "silu" for y / (1 + exp(-y)), or None.
        initial_state: the K - 1 steps before the first one, [B, K - 1, D] in the dtype of x;
            None for zeros.
        return_last_state: also return the last K - 1 steps, the state for what follows.

    Returns:
        [B, T, D] in the dtype of `x`, and with `return_last_state` [B, K - 1, D]. Sums are kept in
        float32 (float64 for float64).

    Example:
        >>> y = metalcore.causal_conv1d(torch.randn(2, 9, 40), torch.randn(40, 4))
    """
    op = "causal_conv1d"
    weight = _checked(op, x, weight, bias, activation, initial_state)
    y, last = _forward(x, weight, bias, initial_state, activation == "silu")
    return (y, last) if return_last_state else y


def causal_conv1d_step(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Literal["silu"] | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of `causal_conv1d`, for generation.

    Args:
        x: this step, [B, D].
        state: the K - 1 steps before it, [B, K - 1, D] in the dtype of x, the latest one last.
        weight, bias, activation: as for `causal_conv1d`.

    Returns:
        The result [B, D], and the state for the next step.

    Example:
        >>> y, state = metalcore.causal_conv1d_step(torch.randn(2, 40), state, weight)
    """
    op = "causal_conv1d_step"
    expect_float(op, x=x, state=state)
    expect(x.dim() == 2, op, f"x must be [B, D], got {shape(x)}")
    weight = _checked(op, x[:, None], weight, bias, activation, state)
    y, last = _forward(x[:, None], weight, bias, state, activation == "silu")
    return y[:, 0], last


def _checked(
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    state: Tensor | None,
) -> Tensor:
    """The weight as [D, K], where all goes together."""
    expect_float(op, x=x, weight=weight)
    expect_float_or_none(op, bias=bias, state=state)
    expect_same_device(op, x=x, weight=weight, bias=bias, state=state)
    expect(x.dim() == 3, op, f"x must be [B, T, D], got {shape(x)}")
    taps = weight[:, 0] if weight.dim() == 3 and weight.shape[1] == 1 else weight
    if taps.dim() != 2 or taps.shape[0] != x.shape[2] or not 2 <= taps.shape[1] <= 8:
        refuse(op, f"weight must be [{x.shape[2]}, K] with K from 2 to 8, got {shape(weight)}")
    expect_shape(op, "bias", bias, x.shape[2:])
    if state is not None:
        expect_same_dtype(op, x=x, state=state)
        expect_shape(op, "state", state, (x.shape[0], taps.shape[1] - 1, x.shape[2]))
    if activation not in (None, "silu"):
        refuse(op, f"activation must be 'silu' or None, got {activation!r}")
    return taps


def _extended(x: Tensor, weight: Tensor, state: Tensor | None) -> Tensor:
    """[B, K - 1 + T, D]: the steps of x, and those before."""
    before = weight.shape[1] - 1
    if state is None:
        return F.pad(x, (0, 0, before, 0))
    return torch.cat([state, x], 1)


def _convolved(steps: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Sums before the activation, [B, T, D], in the type of sums."""
    a = accumulate(steps)
    w = accumulate(weight).to(a.dtype)
    count = a.shape[1] - w.shape[1] + 1
    total = sum((a[:, j : j + count] * w[:, j] for j in range(w.shape[1])), a.new_zeros(()))
    return total if bias is None else total + accumulate(bias).to(a.dtype)


@_forward.reference
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    steps = _extended(x, weight, state)
    y = _convolved(steps, weight, bias)
    y = F.silu(y) if silu else y
    last = steps[:, steps.shape[1] - weight.shape[1] + 1 :]
    return y.to(x.dtype, memory_format=torch.contiguous_format), last.clone(
        memory_format=torch.contiguous_format
    )


@_backward.reference
def _(
    dy: Tensor,
    dlast: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    steps = _extended(x, weight, state)
    a, g = accumulate(steps), accumulate(dy)
    w = accumulate(weight).to(a.dtype)
    taps, count = w.shape[1], x.shape[1]
    if silu:
        s = torch.sigmoid(y := _convolved(steps, weight, bias))
        g = g * (s + y * s * (1 - s))
    later = F.pad(g, (0, 0, taps - 1, taps - 1))
    # the step r of `steps` meets weight j in the result r - j
    dsteps = sum(
        (later[:, taps - 1 - j :][:, : count + taps - 1] * w[:, j] for j in range(taps)),
        a.new_zeros(()),
    )
    if dlast is not None:
        dsteps = dsteps + F.pad(accumulate(dlast), (0, 0, count, 0))
    products = [(g * a[:, j : j + count]).sum((0, 1)) for j in range(taps)]
    dweight = torch.stack(products, 1).to(weight.dtype)
    nothing = dy.new_empty(0)
    dbias = nothing if bias is None else g.sum((0, 1)).to(bias.dtype)
    dsteps = dsteps.to(x.dtype)
    dense = torch.contiguous_format
    dx = dsteps[:, taps - 1 :].clone(memory_format=dense)
    dstate = dsteps[:, : taps - 1].clone(memory_format=dense) if state is not None else nothing
    return dx, dweight, dbias, dstate


_backward.differentiate_reference()


@_forward.example
def _(dtype: torch.dtype) -> Example:
    x, weight, bias, state = (
        torch.randn(s).to(dtype) for s in ((2, 9, 40), (40, 3), (40,), (2, 2, 40))
    )
    return Example((x, weight, bias, state, True), reduces_over=5)


@_backward.example
def _(dtype: torch.dtype) -> Example:
    x, weight, bias, state = (
        torch.randn(s).to(dtype) for s in ((2, 9, 40), (40, 3), (40,), (2, 2, 40))
    )
    return Example((x.flip(1), state.flip(1), x, weight, bias, state, True), reduces_over=18)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.silu = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


@_forward.gradient(save=_save)
def _(ctx: Any, dy: Tensor | None, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, bias, state = ctx.saved_tensors
    if dy is None and dlast is None:
        return (None,) * 5
    dy = torch.zeros_like(x) if dy is None else dy
    dx, dweight, dbias, dstate = _backward(dy, dlast, x, weight, bias, state, ctx.silu)
    return (
        dx,
        dweight,
        None if bias is None else dbias,
        None if state is None else dstate,
        None,
    )
