# SPDX-License-Identifier: MIT
"""Cross entropy of `hidden @ weight.T + bias`, which is never held for all tokens."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metalcore._accuracy import set_accuracy
from metalcore._autocast import is_autocast, to_multiply, without_autocast
from metalcore._check import (
    are_transformed,
    expect_same_device,
    expect_shape,
    expect_tensors,
    refuse,
)
from metalcore._op import accumulate_dtype
from metalcore.ops.train._chunks import Gradients, expect_linear, run
from metalcore.ops.train.cross_entropy import (
    FLOAT16_SCALE,
    REDUCTIONS,
    cross_entropy,
    expect_class_indices,
    expect_reduction,
    expect_smoothing,
    forward,
    in_place,
    is_one,
)

# logits and their gradient are rounded on the way, and a weight's gradient once per chunk
set_accuracy("linear_cross_entropy", 8.0)

# A copy of the tokens that count is worth it if they are no more than this share of all.
_MANY = 0.9


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`cross_entropy(linear(hidden, weight, bias), target)` in the memory of a few rows of logits.

    The gradients of hidden, weight and bias are computed in the forward pass, chunk by chunk, and
    those of half precision weights are rounded once per chunk. There are no second derivatives,
    but under the transforms of torch.func, which hold all logits.
    How much memory a chunk takes is `chunk_mib` of the launch policy.

    Args:
        hidden: [..., H], float32, float64, float16 or bfloat16.
        weight: [C, H], in the dtype of `hidden`; may be tied to an embedding.
        target: class indices, int64, [...].
        bias: [C].
        ignore_index, reduction, label_smoothing, z_loss, softcap: as for `cross_entropy`.
        dtype: of the loss; default that of `hidden` (float32 under autocast).

    Returns:
        The loss, a scalar or [...].

    Example:
        >>> loss = metalcore.linear_cross_entropy(hidden, model.lm_head.weight, labels)
    """
    op = "linear_cross_entropy"
    expect_tensors(op, hidden=hidden, weight=weight, target=target)
    expect_class_indices(op, target)
    expect_shape(op, "target", target, hidden.shape[:-1])
    expect_same_device(op, hidden=hidden, target=target)
    expect_reduction(op, reduction)
    expect_smoothing(op, label_smoothing)
    if not (softcap is None or softcap > 0):
        refuse(op, f"softcap must be greater than 0, got {softcap}")
    x, w, b = to_multiply(hidden, weight, bias)
    expect_linear(op, x, w, b)
    flat, targets = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    if reduction != "none":
        flat, targets = _without_ignored(flat, targets, ignore_index)
    numbers = (float(label_smoothing), float(z_loss), float(softcap or 0.0))
    how = (ignore_index, *numbers, REDUCTIONS[reduction])
    if are_transformed():
        loss = _of_logits(flat, w, b, targets, how)
    else:
        loss = _LinearCrossEntropy.apply(flat, w, b, targets, *how)  # type: ignore[no-untyped-call]
        if reduction == "mean" and x.dtype == torch.float16:
            loss = loss / FLOAT16_SCALE
    if dtype is not None or not is_autocast(hidden):
        loss = loss.to(dtype or hidden.dtype)
    return loss.view(target.shape) if reduction == "none" else loss


def _without_ignored(hidden: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The tokens that count, where many do not: a prompt that is masked out costs no products.

    On a CPU only: a GPU would have to wait for their number.
    """
    if type(target) is not Tensor or not target.is_cpu or torch.compiler.is_compiling():
        return hidden, target
    if are_transformed():
        return hidden, target
    counts = target != ignore_index
    if int(counts.sum()) > _MANY * target.numel():
        return hidden, target
    return hidden[counts], target[counts]


def _of_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, how: tuple[Any, ...]
) -> Tensor:
    """The loss by all logits at once, which has every derivative."""
    ignore_index, label_smoothing, z_loss, softcap, reduction = how
    return cross_entropy(
        F.linear(hidden, weight, bias),
        target,
        ignore_index=ignore_index,
        reduction=next(name for name, code in REDUCTIONS.items() if code == reduction),
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap or None,
    )


class _LinearCrossEntropy(torch.autograd.Function):
    """Gives away the gradients that its forward pass computed; autograd would copy outputs.

    So it is no op: what an op saves for its backward pass stays alive while that runs.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *how: Any
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.how = how
        # one loss per token: what they are weighted by is not known before the backward pass
        ctx.ready = None
        if how[-1] != REDUCTIONS["none"] and any(ctx.needs_input_grad[:3]):
            loss, ctx.ready = _run(hidden, weight, bias, target, how, ctx.needs_input_grad[:3])
        else:
            loss, _ = _run(hidden, weight, bias, target, how, None)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        hidden, weight, bias, target = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return *_to_differentiate_again(ctx, dloss), *(None,) * (1 + len(ctx.how))
        by_token = dloss if ctx.how[-1] == REDUCTIONS["none"] else None
        # what was computed is given away; a second backward pass computes it again
        grads, ctx.ready = ctx.ready, None
        if grads is None:
            wanted = ctx.needs_input_grad[:3]
            _, grads = _run(hidden, weight, bias, target, ctx.how, wanted, by_token)
        if by_token is None and not is_one(dloss):
            grads = tuple(g if g is None else g.mul_(dloss) for g in grads)
        return *grads, *(None,) * (1 + len(ctx.how))


def _to_differentiate_again(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients, with a graph of their own."""
    hidden, weight, bias, target = ctx.saved_tensors
    loss = _of_logits(hidden, weight, bias, target, ctx.how)
    if ctx.how[-1] == REDUCTIONS["mean"] and hidden.dtype == torch.float16:
        loss = loss * FLOAT16_SCALE
    wanted = [
        t for t, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False) if needed
    ]
    found = iter(torch.autograd.grad(loss, wanted, dloss.to(loss.dtype), create_graph=True))
    return tuple(next(found) if needed else None for needed in ctx.needs_input_grad[:3])


def _run(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    how: tuple[Any, ...],
    wanted: tuple[bool, bool, bool] | None,
    by_token: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The loss, and the gradients that are wanted: of the loss, or weighted `by_token`."""
    *rest, reduction = how
    count = None
    if reduction == REDUCTIONS["mean"]:
        count = (target != rest[0]).sum(dtype=accumulate_dtype(hidden))
        if hidden.dtype == torch.float16:
            count = count / FLOAT16_SCALE

    def loss(logits: Tensor, rows: slice, need_dlogits: bool) -> tuple[Tensor, Tensor | None]:
        args = (logits, target[rows], None, count, *how)
        if not need_dlogits:
            return forward(*args, False)[0], None
        if torch.compiler.is_compiling():
            one, dlogits = forward(*args, True)
        else:
            one, dlogits = in_place(*args)[0], logits
        return one, dlogits if by_token is None else dlogits.mul_(by_token[rows, None])

    gradients = None if wanted is None else Gradients(hidden, weight, bias, wanted)
    with torch.no_grad(), without_autocast(hidden):
        losses = run(hidden, weight, bias, loss, gradients)
    if reduction == REDUCTIONS["none"]:
        whole = torch.cat(losses) if losses else hidden.new_empty(0, dtype=accumulate_dtype(hidden))
    elif losses:
        whole = torch.stack(losses).sum()
    else:
        # the mean of nothing is NaN
        zero = hidden.new_zeros((), dtype=accumulate_dtype(hidden))
        whole = zero if count is None else zero / count
    return whole, (None, None, None) if gradients is None else gradients.all
