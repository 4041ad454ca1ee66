# SPDX-License-Identifier: MIT
"""Attention: softmax(scale * q k^T, with masks) v, and its gradient, without a matrix of scores."""

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from metalcore import _trace
from metalcore._autocast import to_multiply
from metalcore._check import expect_same_device
from metalcore._op import Example, Op, accumulate
from metalcore.ops.attention._arguments import (
    Window,
    as_heads,
    as_limits,
    as_mask,
    as_scale,
    expect_numbers,
    expect_per_head,
    expect_starts,
)

_MASKS = "Tensor? mask, Tensor? alibi_slopes, Tensor? sinks"
_STARTS = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
_NUMBERS = "float scale, float? softcap, int? left, int? right"


def _letters(q: Any, k: Any, *_: Any) -> str:
    # one head of keys for all queries is repeated, and its gradients are sums over heads
    h = "H" if k.shape[1] == 1 < q.shape[1] else "h"
    return f"bhQD, b{h}KD, b{h}KE, bhQK, bh, h, S, S -> bhQE, bhQ"


def _letters_of_backward(dout: Any, dlse: Any, out: Any, lse: Any, *inputs: Any) -> str:
    words, _, _ = _letters(*inputs).partition(" ->")
    q, k, v = words.split(", ")[:3]
    sinks = "Z" if inputs[5] is None else "h"
    return f"bhQE, bhQ, bhQE, bhQ, {words} -> {q}, {k}, {v}, {sinks}"


forward = Op(
    f"attention(Tensor q, Tensor k, Tensor v, {_MASKS}, {_STARTS}, {_NUMBERS})"
    " -> (Tensor out, Tensor lse)",
    sharding=_letters,
)
backward = Op(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor q, Tensor k,"
    f" Tensor v, {_MASKS}, {_STARTS}, {_NUMBERS})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    sharding=_letters_of_backward,
)


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    window: Window = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    window: Window = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    window: Window = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Each query's mean of the values, weighted by the softmax of its products with the keys.

    The last query stands at the last key, as in generation with a cache; `causal`, `window` and
    `alibi_slopes` count from there. (`F.scaled_dot_product_attention` puts the first query at the
    first key: another result where there are more keys than queries.) What a query does not see
    does not change its result, NaN included. A query without keys gives zeros.

    Args:
        q: queries [B, H, Tq, D], float32, float64, float16 or bfloat16. Any strides; copied only
            if the last dimension has gaps.
        k, v: [B, Hk, Tk, D] and [B, Hk, Tk, Dv]; each of the Hk heads serves H / Hk heads of q.
            All three may be without B.
        mask: broadcastable to [B, H, Tq, Tk]: True where a query sees a key, or numbers to add
            (float32 or the dtype of q), of which -inf hides a key.
        causal: a query sees no keys after its own position.
        window: n: a query sees keys that are less than n positions away. (left, right): so many
            before and after its own position, -1 for all.
        softcap: scores become softcap * tanh(scores / softcap), before masks.
        alibi_slopes: [H] or [B, H]: slope * distance is taken from the scores.
        sinks: [H]: a score of each head that takes part in the softmax and has no value.
        scale: of the products, D^-0.5 if it is None.
        cu_seqlens_q, cu_seqlens_k: where packed sequences start, and the end of the last, int32 or
            int64 [sequences + 1]. Then q is [Tq, H, D], k and v likewise, each sequence is on its
            own, and a mask is for [1, H, Tq, Tk]. On a GPU they are not checked.
        return_lse: also return the logarithm of the softmax's denominator.

    Returns:
        [B, H, Tq, Dv] in the dtype of q, in memory as [B, Tq, H, Dv]; with cu_seqlens [Tq, H, Dv].
        With `return_lse` also float32 (float64) [B, H, Tq], or [H, Tq]: -inf without keys and
        sinks. Both have gradients.

    Example:
        >>> y = metalcore.attention(q, k, v, causal=True, window=4096)
    """
    op = "attention"
    are_packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    has_entries = q.dim() == 4
    q, k, v = to_multiply(q, k, v)
    q, k, v = as_heads(op, q, k, v, are_packed)
    limits = as_limits(op, causal, window)
    scale = as_scale(scale, q)
    expect_numbers(op, scale, softcap)
    mask = None if mask is None else as_mask(op, mask, q, k)
    expect_per_head(op, "alibi_slopes", alibi_slopes, q, per_entry=True)
    expect_per_head(op, "sinks", sinks, q)
    expect_same_device(op, q=q, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    expect_starts(op, cu_seqlens_q, cu_seqlens_k, q.shape[2], k.shape[2])
    cap = None if softcap is None else float(softcap)
    starts = (cu_seqlens_q, cu_seqlens_k)
    out, lse = forward(q, k, v, mask, alibi_slopes, sinks, *starts, scale, cap, *limits)
    if are_packed:
        out, lse = out[0].transpose(0, 1), lse[0]
    elif not has_entries:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


class _Scores(NamedTuple):
    """What softmax sees, [B, H, Tq, Tk]: -inf where a key is hidden."""

    values: Tensor
    visible: Tensor
    cap_slope: Tensor | None
    distance: Tensor


def _places(rows: int, starts: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each row: its sequence, and its place counted from the sequence's end."""
    row = torch.arange(rows, device=device)
    if starts is None:
        return torch.zeros_like(row), row - rows
    sequence = torch.bucketize(row, starts[1:], right=True)
    ends = starts[1:].to(row.dtype)
    return sequence, row - ends[sequence] if len(ends) else row


def _score(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    slopes: Tensor | None,
    starts_q: Tensor | None,
    starts_k: Tensor | None,
    scale: float,
    softcap: float | None,
    left: int | None,
    right: int | None,
) -> _Scores:
    """q and k have as many heads, and the type of sums."""
    s = (q * scale) @ k.mT
    cap_slope = None
    if softcap is not None:
        t = torch.tanh(s / softcap)
        s, cap_slope = softcap * t, 1 - t * t
    sequence_q, place_q = _places(q.shape[2], starts_q, q.device)
    sequence_k, place_k = _places(k.shape[2], starts_k, q.device)
    distance = place_k - place_q[:, None]
    visible = sequence_q[:, None] == sequence_k
    if left is not None:
        visible = visible & (distance >= -left)
    if right is not None:
        visible = visible & (distance <= right)
    if slopes is not None:
        s = s - slopes.to(s.dtype)[..., None, None] * distance.abs()
    if mask is not None:
        visible = visible & (mask if mask.dtype == torch.bool else mask != -torch.inf)
        if mask.dtype != torch.bool:
            s = s + mask.to(s.dtype)
    visible = visible.expand(s.shape)
    return _Scores(s.masked_fill(~visible, -torch.inf), visible, cap_slope, distance)


def _sum_visible(weights: Tensor, visible: Tensor, values: Tensor) -> Tensor:
    """weights @ values, where a hidden pair adds nothing: 0 * NaN is NaN."""
    total = weights @ torch.where(values.isfinite(), values, 0)
    seen = visible.to(values.dtype)
    for special in (torch.nan, torch.inf, -torch.inf):
        is_special = values.isnan() if special != special else values == special
        hit = (seen @ is_special.to(values.dtype)) > 0
        total = torch.where(hit, total + special, total)
    return total


def _for_each_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values [B, Hk, T, D] in the type of sums, repeated for the heads of q."""
    return accumulate(x).repeat_interleave(q.shape[1] // max(1, x.shape[1]), 1)


def _of_each_group(x: Tensor, k: Tensor) -> Tensor:
    """The sum over the heads that share one of k."""
    group = x.shape[1] // max(1, k.shape[1])
    return x.unflatten(1, (k.shape[1], group)).sum(2) if k.shape[1] else x


def _laid_out(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In memory [B, T, H, D], which projections take without a copy."""
    rows = x.to(dtype).transpose(1, 2).clone(memory_format=torch.contiguous_format)
    return rows.transpose(1, 2)


@forward.reference
def attention_meaning(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    *how: Any,
) -> tuple[Tensor, Tensor]:
    """Attention in plain torch, with a matrix of scores."""
    scores = _score(accumulate(q), _for_each_head(k, q), mask, slopes, *how)
    # without keys: some number, so that no gradient is NaN
    is_alone = ~scores.visible.any(-1)
    lse = scores.values.masked_fill(is_alone[..., None], 0).logsumexp(-1)
    lse = lse.masked_fill(is_alone, -torch.inf)
    if sinks is not None:
        lse = torch.logaddexp(lse, accumulate(sinks)[:, None])
    total = lse.masked_fill(lse == -torch.inf, 0)
    p = torch.exp(scores.values - total[..., None])
    out = _sum_visible(p, scores.visible, _for_each_head(v, q))
    return _laid_out(out, q.dtype), lse.contiguous()


class _Pulled(NamedTuple):
    """Gradients of the scores, and what they are made of."""

    scores: _Scores
    p: Tensor
    ds: Tensor
    delta: Tensor


def _pull(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    slopes: Tensor | None,
    *how: Any,
) -> _Pulled:
    scores = _score(accumulate(q), _for_each_head(k, q), mask, slopes, *how)
    d = accumulate(dout)
    is_alone = lse == -torch.inf
    p = torch.exp(scores.values - lse.masked_fill(is_alone, 0)[..., None])
    delta = (d * accumulate(out)).sum(-1)
    delta = delta if dlse is None else delta - dlse
    delta = delta.masked_fill(is_alone, 0)
    ds = p * (d @ _for_each_head(v, q).mT - delta[..., None])
    return _Pulled(scores, p, torch.where(scores.visible, ds, 0), delta)


@backward.reference
def _(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    *how: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scores, p, ds, delta = _pull(dout, dlse, out, lse, q, k, v, mask, slopes, *how)
    scale = how[2]
    if sinks is None:
        dsinks = lse.new_zeros(0)
    else:
        dsinks = -(torch.exp(accumulate(sinks)[:, None] - lse) * delta).sum((0, 2)).to(sinks.dtype)
    ds = ds if scores.cap_slope is None else ds * scores.cap_slope
    ds = torch.where(scores.visible, ds, 0)
    # rows without keys may hold anything
    is_alone = (lse == -torch.inf)[..., None]
    rows = accumulate(q).masked_fill(is_alone, 0)
    drows = accumulate(dout).masked_fill(is_alone, 0)
    dq = scale * _sum_visible(ds, scores.visible, _for_each_head(k, q))
    dk = scale * _of_each_group(ds.mT @ rows, k)
    dv = _of_each_group(p.mT @ drows, v)
    dtype = q.dtype
    return _laid_out(dq, dtype), _laid_out(dk, dtype), _laid_out(dv, dtype), dsinks


backward.differentiate_reference()


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:8])
    ctx.how = inputs[8:]
    ctx.set_materialize_grads(False)


@forward.gradient(save=_save)
def _(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
    out, lse, *tensors = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    *_, mask, slopes, sinks, _, _ = tensors
    dq, dk, dv, dsinks = backward(dout, dlse, out, lse, *tensors, *ctx.how)
    dmask, dslopes = None, None
    if ctx.needs_input_grad[3] or ctx.needs_input_grad[4]:
        # a matrix of scores, by torch
        _trace.record_torch_path("attention_backward", dout)
        q, k, v, mask, slopes, _, *starts = tensors
        pulled = _pull(dout, dlse, out, lse, q, k, v, mask, slopes, *starts, *ctx.how)
        if ctx.needs_input_grad[3]:
            dmask = pulled.ds.sum_to_size(mask.shape).to(mask.dtype)
        if ctx.needs_input_grad[4]:
            per_entry = -(pulled.ds * pulled.scores.distance.abs()).sum((2, 3))
            dslopes = per_entry.sum_to_size(slopes.shape).to(slopes.dtype)
    return dq, dk, dv, dmask, dslopes, None if sinks is None else dsinks, *(None,) * 6


def _arguments(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(2, 4, 20, 16).to(dtype)
    k, v = torch.randn(2, 2, 39, 16).to(dtype), torch.randn(2, 2, 39, 9).to(dtype)
    return q, k, v


@forward.example
def _(dtype: torch.dtype) -> Example:
    sinks = torch.randn(4).to(dtype)
    numbers = (None, None, 0.25, 5.0, None, 0)
    return Example((*_arguments(dtype), None, None, sinks, *numbers), reduces_over=55)


@forward.example
def _(dtype: torch.dtype) -> Example:
    mask, slopes = torch.randn(2, 1, 20, 39).to(dtype), torch.rand(2, 4)
    numbers = (None, None, 0.25, None, 3, None)
    return Example((*_arguments(dtype), mask, slopes, None, *numbers), reduces_over=55)


@backward.example
def _(dtype: torch.dtype) -> Example:
    q, k, v = _arguments(dtype)
    out, lse = forward.meaning(q, k, v, *(None,) * 5, 0.25, 5.0, None, 0)
    dout, dlse = torch.randn(2, 4, 20, 9).to(dtype), torch.randn(2, 4, 20).to(lse.dtype)
    given = (dout, dlse, out, lse, q, k, v, None, None, torch.randn(4).to(dtype))
    return Example((*given, None, None, 0.25, 5.0, None, 0), reduces_over=75)
