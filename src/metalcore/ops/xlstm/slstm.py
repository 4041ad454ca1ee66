# SPDX-License-Identifier: MIT
"""sLSTM: memories of single values, whose gates see what their head gave one step before.

Letters: B entries, T steps, H heads, D size of a head; gates in the order i, f, z, o.

    g = x_t + R y_(t-1) + b                            of each head and gate
    lf = log sigmoid(f);  m_t = max(lf + m_(t-1), i)   or i, where nothing was kept so far (n = 0)
    c_t = exp(lf + m_(t-1) - m_t) c_(t-1) + exp(i - m_t) tanh(z),  and n_t likewise of 1
    y_t = sigmoid(o) c_t / n_t

c and n are kept scaled by exp(-m), which y does not depend on.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metalcore._accuracy import set_accuracy
from metalcore._check import (
    expect,
    expect_float,
    expect_float_or_none,
    expect_same_device,
    expect_shape,
    refuse,
    shape,
)
from metalcore._op import Example, Op, accumulate, accumulate_dtype

_ARGS = "Tensor x, Tensor recurrent, Tensor? bias, Tensor? states, float? clip"
_LETTERS = "bTGhD, hDGD, hGD, bGhD"


def _letters_of_backward(*args: Any) -> str:
    bias = "hGD" if args[4] is not None else "Z"
    states = "bGhD" if args[5] is not None else "Z"
    return f"bThD, bGhD, {_LETTERS} -> bTGhD, hDGD, {bias}, {states}"


_forward = Op(f"slstm({_ARGS}) -> (Tensor y, Tensor last)", sharding=f"{_LETTERS} -> bThD, bGhD")
_backward = Op(
    f"slstm_backward(Tensor dy, Tensor? dlast, {_ARGS})"
    " -> (Tensor dx, Tensor drecurrent, Tensor dbias, Tensor dstates)",
    sharding=_letters_of_backward,
)
# every step rounds what the next one starts from
set_accuracy("slstm", 32.0)

States = tuple[Tensor, Tensor, Tensor, Tensor]


def slstm(
    x: Tensor,
    recurrent: Tensor,
    bias: Tensor | None = None,
    *,
    states: States | None = None,
    return_last_states: bool = False,
    gradient_clip: float | None = None,
) -> Tensor | tuple[Tensor, States]:
    """sLSTM over a sequence: exponential gates, and a recurrence within each head.

    Args:
        x: what the gates i, f, z, o get from the input, [B, T, 4, H, D] or [B, T, 4 * H * D],
            float32, float64, float16 or bfloat16.
        recurrent: what they get from the head's last result, [H, D, 4, D] from, gate, to; or
            [H, 4 * D, D] of gate and to, from.
        bias: [H, 4, D], or [4 * H * D] by gate and head; None for zeros.
        states: y, c, n and m to start from, [B, H, D] each; None for none.
        return_last_states: also return the states after the last step.
        gradient_clip: the gradient that comes back through the recurrence is kept within this of 0
            at every step; 0 cuts it.

    Returns:
        y, [B, T, H, D] in the dtype of x. With `return_last_states` also (y, c, n, m) in float32
        (float64), each [B, H, D]. All have gradients.

    Example:
        >>> y = metalcore.slstm(torch.randn(2, 9, 4, 3, 16), torch.randn(3, 16, 4, 16) / 8)
    """
    op = "slstm"
    recurrent, bias = _weights(op, recurrent, bias)
    heads, size = recurrent.shape[:2]
    expect_float(op, x=x)
    if x.dim() == 3 and x.shape[2] == 4 * heads * size:
        x = x.unflatten(2, (4, heads, size))
    if x.dim() != 5 or x.shape[2:] != (4, heads, size):
        refuse(op, f"x must be [B, T, 4, {heads}, {size}] as recurrent is, got {shape(x)}")
    given = _given(op, x, recurrent, bias, states)
    if gradient_clip is not None:
        expect(gradient_clip >= 0, op, f"gradient_clip must not be negative, got {gradient_clip}")
    y, last = _forward(x, recurrent, bias, given, gradient_clip)
    return (y, tuple(last.unbind(1))) if return_last_states else y


def slstm_step(
    x: Tensor,
    recurrent: Tensor,
    bias: Tensor | None = None,
    states: States | None = None,
) -> tuple[Tensor, States]:
    """One step of `slstm`, for generation.

    Args:
        x: [B, 4, H, D] or [B, 4 * H * D].
        recurrent, bias: as for `slstm`.
        states: y, c, n and m, [B, H, D] each; None at the first step.

    Returns:
        y [B, H, D] in the dtype of x, and the next states.

    Example:
        >>> y, states = metalcore.slstm_step(x, recurrent, bias, states)
    """
    expect_float("slstm_step", x=x)
    expect(x.dim() in (2, 4), "slstm_step", f"x must be [B, 4, H, D], got {shape(x)}")
    found: Any = slstm(x[:, None], recurrent, bias, states=states, return_last_states=True)
    y, last = found
    return y[:, 0], last


def _weights(op: str, recurrent: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """[H, D, 4, D] and [H, 4, D], of either layout."""
    expect_float(op, recurrent=recurrent)
    expect_float_or_none(op, bias=bias)
    if recurrent.dim() == 3 and recurrent.shape[1] == 4 * recurrent.shape[2]:
        recurrent = recurrent.unflatten(1, (4, -1)).permute(0, 3, 1, 2)
    s = recurrent.shape
    if len(s) != 4 or s[2] != 4 or s[1] != s[3] or s[1] == 0:
        refuse(op, f"recurrent must be [H, D, 4, D] or [H, 4 * D, D], got {shape(recurrent)}")
    if bias is not None and bias.dim() == 1 and bias.numel() == 4 * s[0] * s[1]:
        bias = bias.view(4, s[0], s[1]).transpose(0, 1)
    expect_shape(op, "bias", bias, (s[0], 4, s[1]))
    return recurrent, bias


def _given(
    op: str, x: Tensor, recurrent: Tensor, bias: Tensor | None, states: States | None
) -> Tensor | None:
    """The states as one tensor, in the type of sums."""
    expect_same_device(op, x=x, recurrent=recurrent, bias=bias)
    dtype = accumulate_dtype(x)
    wide = torch.float64 in (recurrent.dtype, bias.dtype if bias is not None else None)
    if wide and dtype != torch.float64:
        raise TypeError(f"{op}: weights must be no wider than x, got float64")
    if states is None:
        return None
    expect(len(states) == 4, op, f"states must be y, c, n and m, got {len(states)} of them")
    for name, state in zip("ycnm", states, strict=True):
        expect_float(op, **{name: state})
        expect_same_device(op, x=x, **{name: state})
        expect_shape(op, name, state, (x.shape[0], *x.shape[3:]))
    return torch.stack([s.to(dtype) for s in states], 1)


class _Step(NamedTuple):
    """What a step computes: activated gates, 1 - sigmoid(f), whether m is i, and the states."""

    i: Tensor
    f: Tensor
    z: Tensor
    o: Tensor
    forgets: Tensor
    takes_i: Tensor
    y: Tensor
    c: Tensor
    n: Tensor
    m: Tensor


def _step(raw: Tensor, c: Tensor, n: Tensor, m: Tensor) -> _Step:
    i, f, z, o = raw.unbind(1)
    kept = F.logsigmoid(f) + m
    empty = n == 0
    takes_i = empty | (i >= kept)
    now = torch.where(empty, i, torch.maximum(i, kept))
    add = (i - now).exp()
    keep = torch.where(empty, 0.0, torch.where(empty, 0.0, kept - now).exp())
    z, o = torch.tanh(z), torch.sigmoid(o)
    c, n = keep * c + add * z, keep * n + add
    return _Step(add, keep, z, o, torch.sigmoid(-f), takes_i, o * c / n, c, n, now)


def _steps(
    x: Tensor, recurrent: Tensor, bias: Tensor | None, states: Tensor | None
) -> tuple[list[_Step], Tensor, Tensor]:
    """All steps, the recurrent weights and the first states in the type of sums."""
    x_, R = accumulate(x), accumulate(recurrent).to(accumulate_dtype(x))
    B, T, _, H, D = x.shape
    first = x_.new_zeros(B, 4, H, D) if states is None else states
    y, c, n, m = first.unbind(1)
    found = []
    for t in range(T):
        raw = x_[:, t] + torch.einsum("bhd,hdge->bghe", y, R)
        raw = raw if bias is None else raw + accumulate(bias).to(R.dtype).transpose(0, 1)
        step = _step(raw, c, n, m)
        y, c, n, m = step.y, step.c, step.n, step.m
        found.append(step)
    return found, R, first


@_forward.reference
def _(
    x: Tensor,
    recurrent: Tensor,
    bias: Tensor | None,
    states: Tensor | None,
    clip: float | None,
) -> tuple[Tensor, Tensor]:
    found, _, first = _steps(x, recurrent, bias, states)
    if not found:
        return x.new_empty(x.shape[0], 0, *x.shape[3:]), first.clone()
    end = found[-1]
    last = torch.stack([end.y, end.c, end.n, end.m], 1)
    return torch.stack([s.y for s in found], 1).to(x.dtype), last


@_backward.reference
def _(
    dy: Tensor,
    dlast: Tensor | None,
    x: Tensor,
    recurrent: Tensor,
    bias: Tensor | None,
    states: Tensor | None,
    clip: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found, R, first = _steps(x, recurrent, bias, states)
    from_later, dc, dn, dm = (torch.zeros_like(first) if dlast is None else dlast).unbind(1)
    if found:
        # y does not depend on the scale of the states, but the last ones have it
        dm = dm - dc * found[-1].c - dn * found[-1].n
    grads: list[Tensor] = []
    dR = torch.zeros_like(R)
    for t in reversed(range(len(found))):
        s = found[t]
        y, c, n = (found[t - 1].y, found[t - 1].c, found[t - 1].n) if t else first.unbind(1)[:3]
        d = accumulate(dy[:, t]) + from_later
        dc, dn = dc + d * s.o / s.n, dn - d * s.y / s.n
        taken, passed = torch.where(s.takes_i, dm, 0.0), torch.where(s.takes_i, 0.0, dm)
        g = torch.stack(
            [
                s.i * (s.z * dc + dn) + taken,
                (s.f * (c * dc + n * dn) + passed) * s.forgets,
                s.i * dc * (1 - s.z) * (1 + s.z),
                (1 - s.o) * s.y * d,
            ],
            1,
        )
        dc, dn, dm = s.f * dc, s.f * dn, passed
        from_later = torch.einsum("bghe,hdge->bhd", g, R)
        from_later = from_later if clip is None else from_later.clamp(-clip, clip)
        dR = dR + torch.einsum("bhd,bghe->hdge", y, g)
        grads.append(g)
    dx = torch.stack(grads[::-1], 1) if grads else torch.zeros_like(accumulate(x))
    nothing = dy.new_empty(0)
    dbias = nothing
    if bias is not None:
        dbias = dx.sum((0, 1)).transpose(0, 1).to(bias.dtype, memory_format=_DENSE)
    dstates = nothing
    if states is not None:
        dm = dm + dc * states[:, 1] + dn * states[:, 2] if found else dm
        dstates = torch.stack([from_later, dc, dn, dm], 1)
    return dx.to(x.dtype), dR.to(recurrent.dtype, memory_format=_DENSE), dbias, dstates


_DENSE = torch.contiguous_format
_backward.differentiate_reference()


def _sample(dtype: torch.dtype) -> tuple[Any, ...]:
    x, R = torch.randn(2, 7, 4, 3, 5).to(dtype), (torch.randn(3, 5, 4, 5) / 4).to(dtype)
    bias, states = torch.randn(3, 4, 5).to(dtype), torch.randn(2, 4, 3, 5)
    # n is a sum of positive numbers
    states[:, 2] = states[:, 2].abs() + 0.5
    return x, R, bias, states.to(accumulate_dtype(x)), None


@_forward.example
def _(dtype: torch.dtype) -> Example:
    return Example(_sample(dtype), reduces_over=35)


@_backward.example
def _(dtype: torch.dtype) -> Example:
    x, R, bias, states, clip = _sample(dtype)
    dy = torch.randn(2, 7, 3, 5).to(dtype)
    return Example((dy, torch.randn_like(states), x, R, bias, states, clip), reduces_over=70)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.clip = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


@_forward.gradient(save=_save)
def _(ctx: Any, dy: Tensor | None, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
    x, recurrent, bias, states = ctx.saved_tensors
    if dy is None:
        dy = x.new_zeros(x.shape[0], x.shape[1], *x.shape[3:])
    dx, drecurrent, dbias, dstates = _backward(dy, dlast, x, recurrent, bias, states, ctx.clip)
    return (
        dx,
        drecurrent,
        None if bias is None else dbias,
        None if states is None else dstates,
        None,
    )
