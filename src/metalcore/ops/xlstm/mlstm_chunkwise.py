# SPDX-License-Identifier: MIT
"""mLSTM over a sequence: a matrix as memory, read by queries and written by keys and values.

What it computes is in `_mlstm.py`.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from metalcore._accuracy import set_accuracy
from metalcore._autograd import pull_back
from metalcore._check import expect, expect_same_device, refuse, shape
from metalcore._op import Example, Op, accumulate_dtype
from metalcore.ops.xlstm._mlstm import (
    as_rule,
    as_states,
    expect_inputs,
    expect_starts,
    laid_out,
    meaning,
)

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor i, Tensor f"
_STATES = "Tensor? c, Tensor? n, Tensor? m, Tensor? cu_seqlens"
_RULE = "float eps, bool sigmoid, bool normalize, bool nx, int chunk_size"
_LETTERS = "bhTD, bhTD, bhTE, bhT, bhT, bhDE, bhD, bh"


def _letters(*args: Any) -> str:
    words = f"{_LETTERS}, C -> bhTE, bhDE, bhD, bh"
    return words if args[8] is None else words.replace("b", "B")


def _letters_of_backward(*args: Any) -> str:
    words = f"bhTE, bhDE, bhD, bh, {_LETTERS}, C -> {_LETTERS}"
    return words if args[12] is None else words.replace("b", "B")


_forward = Op(
    f"mlstm_chunkwise({_INPUTS}, {_STATES}, {_RULE})"
    " -> (Tensor h, Tensor c_last, Tensor n_last, Tensor m_last)",
    sharding=_letters,
)
backward = Op(
    "mlstm_chunkwise_backward(Tensor dh, Tensor? dc_last, Tensor? dn_last, Tensor? dm_last,"
    f" {_INPUTS}, {_STATES}, {_RULE}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor di,"
    " Tensor df, Tensor dc, Tensor dn, Tensor dm)",
    sharding=_letters_of_backward,
)
# a gradient is a chain of products: of q and k, with v, over the last states, and of the gates
set_accuracy("mlstm_chunkwise", 16.0)
# Steps at a time, where nothing is said.
CHUNK = 64

Last = tuple[Tensor, ...]


def mlstm_chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    m_initial: Tensor | None = None,
    return_last_states: bool = False,
    eps: float = 1e-6,
    chunk_size: int | None = None,
    gate: Literal["exp", "sigmoid"] = "exp",
    normalize: bool = True,
    grad: Literal["exact", "nx"] = "exact",
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Last]:
    """mLSTM over sequences of any length, chunk by chunk: time grows with the length alone.

    Args:
        q, k: queries and keys [B, H, T, D], float32, float64, float16 or bfloat16.
        v: values [B, H, T, E].
        i, f: input and forget gates before their activations, [B, H, T].
        c_initial, n_initial, m_initial: the states to start from, [B, H, D, E], [B, H, D] and
            [B, H, 1]; zeros if they are None.
        return_last_states: also return the states after the last step.
        eps: added to the divisor, which is scaled by exp(-m) as the states are.
        chunk_size: steps that are computed at a time on a CPU; the result is the same up to
            rounding.
        gate: "exp", or "sigmoid" for input gates that are sigmoids and states without m.
        normalize: whether h is divided by max(|q n|, 1); False for gate="sigmoid" alone.
        grad: "exact" for the gradient; "nx" for the one that mlstm_kernels trains with, which takes
            divisor and m for constants.
        cu_seqlens: where packed sequences start, and the end of the last one, int32 or int64
            [N + 1]. Then q is [T, H, D], the others likewise, and states are [N, H, ...]. On a GPU
            they are not checked.

    Returns:
        h, [B, H, T, E] in the dtype of q and in memory as [B, T, H, E]; with cu_seqlens [T, H, E].
        With `return_last_states` also (C, n, m), or (C, n) of sigmoid gates, in float32 (float64).
        All have gradients.

    Example:
        >>> h = metalcore.mlstm_chunkwise(q, k, v, i, f)
        >>> h, (c, n, m) = metalcore.mlstm_chunkwise(q, k, v, i, f, return_last_states=True)
    """
    op = "mlstm_chunkwise"
    rule = as_rule(op, eps, gate, normalize, grad)
    is_packed = cu_seqlens is not None
    expect_inputs(op, q, k, v, i, f)
    form = "[T, H, D] with cu_seqlens" if is_packed else "[B, H, T, D]"
    expect(q.dim() == (3 if is_packed else 4), op, f"q must be {form}, got {shape(q)}")
    if chunk_size is not None and not 16 <= chunk_size <= 256:
        refuse(op, f"chunk_size must be from 16 to 256, got {chunk_size}")
    sequences = q.shape[0]
    if cu_seqlens is not None:
        expect_same_device(op, q=q, cu_seqlens=cu_seqlens)
        expect_starts(op, cu_seqlens, q.shape[0])
        sequences = len(cu_seqlens) - 1
        q, k, v, i, f = (x.transpose(0, 1)[None] for x in (q, k, v, i, f))
    given = (c_initial, n_initial, m_initial)
    states = as_states(op, given, rule.sigmoid, q, v, (sequences, q.shape[1]))
    h: Tensor
    h, c, n, m = _forward(q, k, v, i, f, *states, cu_seqlens, *rule, chunk_size or CHUNK)
    h = h[0].transpose(0, 1) if is_packed else h
    if not return_last_states:
        return h
    return h, (c, n) if rule.sigmoid else (c, n, m[..., None])


def mlstm_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    eps: float = 1e-6,
    gate: Literal["exp", "sigmoid"] = "exp",
    normalize: bool = True,
    grad: Literal["exact", "nx"] = "exact",
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """mLSTM over whole sequences that start from nothing.

    It means what `mlstm_chunkwise` and steps of `mlstm_step` mean, and is computed by chunks too:
    no matrix of weights over all pairs of steps is ever made.

    Args:
        q, k, v, i, f, eps, gate, normalize, grad, cu_seqlens: as for `mlstm_chunkwise`.

    Returns:
        h, [B, H, T, E] in the dtype of q.

    Example:
        >>> h = metalcore.mlstm_parallel(q, k, v, i, f)
    """
    how: dict[str, Any] = {"eps": eps, "gate": gate, "normalize": normalize, "grad": grad}
    h = mlstm_chunkwise(q, k, v, i, f, cu_seqlens=cu_seqlens, **how)
    assert isinstance(h, Tensor)
    return h


@_forward.reference
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *inputs, _chunk_size = arguments
    return meaning(*inputs)


@backward.reference
def _(
    dh: Tensor, dc: Tensor | None, dn: Tensor | None, dm: Tensor | None, *arguments: Any
) -> tuple[Tensor, ...]:
    tensors, (starts, *rule, _chunk_size) = arguments[:8], arguments[8:]
    given = [x for x in tensors if x is not None]
    absent = (None,) * (8 - len(given))

    def outputs(*values: Tensor) -> tuple[Tensor, ...]:
        inputs: Any = (*values, *absent, starts, *rule)
        return meaning(*inputs)

    found: Any = given
    # torch.func knows no meta tensors, which only ask for shapes
    if not dh.is_meta:
        found = pull_back(outputs, given, (dh, dc, dn, dm))
    grads = [laid_out(g, g.dtype) for g in found[:3]]
    grads += [g.clone(memory_format=torch.contiguous_format) for g in found[3:]]
    return (*grads, *(dh.new_empty(0) for _ in absent))


backward.differentiate_reference()


def _sample(dtype: torch.dtype) -> tuple[Any, ...]:
    q, k, v = (torch.randn(2, 3, 37, n).to(dtype) for n in (8, 8, 5))
    i, f = torch.randn(2, 3, 37).to(dtype), (torch.randn(2, 3, 37) + 2).to(dtype)
    sums = accumulate_dtype(q)
    c, n, m = torch.randn(2, 3, 8, 5), torch.randn(2, 3, 8), torch.randn(2, 3)
    return q, k, v, i, f, c.to(sums), n.to(sums), m.to(sums), None


@_forward.example
def _(dtype: torch.dtype) -> Example:
    return Example((*_sample(dtype), 1e-6, False, True, False, 16), reduces_over=64)


@backward.example
def _(dtype: torch.dtype) -> Example:
    args = (*_sample(dtype), 1e-6, False, True, False, 16)
    h, c, n, m = meaning(*args[:-1])
    return Example((torch.randn(h.shape).to(dtype), c, n, m, *args), reduces_over=128)


def _packed_sample(dtype: torch.dtype) -> tuple[Any, ...]:
    """Two sequences that start from nothing."""
    q, k, v, i, f = (x[:1] for x in _sample(dtype)[:5])
    return q, k, v, i, f, None, None, None, torch.tensor([0, 34, 37])


@_forward.example
def _(dtype: torch.dtype) -> Example:
    return Example((*_packed_sample(dtype), 1e-6, False, True, False, 16), reduces_over=64)


@backward.example
def _(dtype: torch.dtype) -> Example:
    dh, none = torch.randn(1, 3, 37, 5).to(dtype), (None, None, None)
    rule = (1e-6, False, True, False, 16)
    return Example((dh, *none, *_packed_sample(dtype), *rule), reduces_over=128)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.rule = inputs[9:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:9])


@_forward.gradient(save=_save)
def _(ctx: Any, dh: Tensor | None, *dlast: Tensor | None) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    dh = torch.zeros_like(tensors[2]) if dh is None else dh
    grads = backward(dh, *dlast, *tensors, *ctx.rule)
    states = (g if t is not None else None for g, t in zip(grads[5:], tensors[5:8], strict=True))
    return *grads[:5], *states, None, *(None for _ in ctx.rule)
