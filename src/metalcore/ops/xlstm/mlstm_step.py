# SPDX-License-Identifier: MIT
"""One step of an mLSTM, for generation: memory and time do not grow. See `_mlstm.py`."""

from typing import Any, Literal

import torch
from torch import Tensor

from metalcore._accuracy import set_accuracy
from metalcore._check import expect, refuse, shape
from metalcore._op import Example, Op, accumulate_dtype
from metalcore.ops.xlstm._mlstm import as_rule, as_states, expect_inputs, meaning
from metalcore.ops.xlstm.mlstm_chunkwise import CHUNK, backward

_step = Op(
    "mlstm_step(Tensor q, Tensor k, Tensor v, Tensor i, Tensor f, Tensor c, Tensor n, Tensor m,"
    " float eps, bool sigmoid, bool normalize, bool nx)"
    " -> (Tensor h, Tensor c_next, Tensor n_next, Tensor m_next)",
    sharding="bhD, bhD, bhE, bh, bh, bhDE, bhD, bh -> bhE, bhDE, bhD, bh",
)
set_accuracy("mlstm_step", 16.0)


def mlstm_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c: Tensor | None = None,
    n: Tensor | None = None,
    m: Tensor | None = None,
    *,
    eps: float = 1e-6,
    gate: Literal["exp", "sigmoid"] = "exp",
    normalize: bool = True,
    grad: Literal["exact", "nx"] = "exact",
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One step of `mlstm_chunkwise`.

    Args:
        q, k: [B, H, D].
        v: [B, H, E].
        i, f: gates before their activations, [B, H] or [B, H, 1].
        c, n, m: the states, [B, H, D, E], [B, H, D] and [B, H, 1]; None at the first step.
        eps, gate, normalize, grad: as for `mlstm_chunkwise`.

    Returns:
        h [B, H, E] in the dtype of q, and the next states, (C, n, m) or (C, n) of sigmoid gates, in
        float32 (float64).

    Example:
        >>> h, (c, n, m) = metalcore.mlstm_step(q, k, v, i, f, c, n, m)
    """
    op = "mlstm_step"
    rule = as_rule(op, eps, gate, normalize, grad)
    expect(q.dim() == 3, op, f"q must be [B, H, D], got {shape(q)}")
    i, f = (x[..., 0] if x.dim() == 3 and x.shape[2] == 1 else x for x in (i, f))
    expect_inputs(op, q, k, v, i, f)
    B, H, D = q.shape
    states = as_states(op, (c, n, m), rule.sigmoid, q, v, (B, H))
    if states[0] is None:
        zeros = q.new_zeros((B, H, D, v.shape[2] + 1), dtype=accumulate_dtype(q))
        states = (zeros[..., 1:], zeros[..., 0], zeros[..., 0, 0] if D else q.new_zeros((B, H)))
    h, c_next, n_next, m_next = _step(q, k, v, i, f, *states, *rule)
    return h, (c_next, n_next) if rule.sigmoid else (c_next, n_next, m_next[..., None])


@_step.reference
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *inputs, c, n, m = arguments[:8]
    if not inputs[3].shape == inputs[4].shape == inputs[0].shape[:2]:
        refuse("mlstm_step", f"gates must be [B, H], got {shape(inputs[3])}, {shape(inputs[4])}")
    sequence: Any = (*(x[:, :, None] for x in inputs), c, n, m, None, *arguments[8:])
    h, c, n, m = meaning(*sequence)
    return h[:, :, 0].clone(memory_format=torch.contiguous_format), c, n, m


@_step.example
def _(dtype: torch.dtype) -> Example:
    q, k, v = (torch.randn(2, 3, n).to(dtype) for n in (8, 8, 5))
    i, f = torch.randn(2, 3).to(dtype), torch.randn(2, 3).to(dtype)
    sums = accumulate_dtype(q)
    c, n, m = torch.randn(2, 3, 8, 5), torch.randn(2, 3, 8), torch.randn(2, 3)
    states = (c.to(sums), n.to(sums), m.to(sums))
    return Example((q, k, v, i, f, *states, 1e-6, False, True, False), reduces_over=8)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.rule = inputs[8:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:8])


@_step.gradient(save=_save)
def _(ctx: Any, dh: Tensor | None, *dnext: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, c, n, m = ctx.saved_tensors
    dh = torch.zeros_like(inputs[2]) if dh is None else dh
    rows = (x[:, :, None] for x in inputs)
    # a sequence of one step
    grads = backward(*(dh[:, :, None], *dnext, *rows, c, n, m, None, *ctx.rule, CHUNK))
    return *(g[:, :, 0] for g in grads[:5]), *grads[5:], *(None for _ in ctx.rule)
