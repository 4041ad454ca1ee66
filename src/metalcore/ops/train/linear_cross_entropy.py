# SPDX-License-Identifier: MIT
"""Cross entropy of `hidden @ weight.T + bias`, which is never held for all tokens."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metalcore._accuracy import set_accuracy
from metalcore._autocast import is_autocast, to_multiply, without_autocast
from metalcore._check import (
    are_transformed,
    expect,
    expect_same_device,
    expect_shape,
    expect_tensors,
    refuse,
)
from metalcore._op import accumulate_dtype
from metalcore._sharding import are_sharded
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
        weight: [C, H], in the dtype of `hidden`; may be tied to an embedding. A DTensor of which
            each process has some of the classes stays so: three numbers per token are exchanged.
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
    if are_sharded((hidden, weight)):
        options = (ignore_index, reduction, label_smoothing, z_loss, softcap)
        return _of_parts(hidden, weight, target, bias, *options, dtype)
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
        loss = _LinearCrossEntropy.apply(flat, w, b, targets, None, *how)  # type: ignore[no-untyped-call]
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


class _Share(NamedTuple):
    """What this process has of a loss whose classes, or tokens, are split over processes."""

    split: Any
    """A `_vocabulary.Split`."""
    divisor: Tensor | None
    """Of the sum; None for no mean."""

    def loss(
        self,
        logits: Tensor,
        target: Tensor,
        reduction: int,
        by_token: Tensor | None,
        rows: slice,
        need_dlogits: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """As `_chunks.ChunkLoss`, in the memory of the logits."""
        numbers = self.split.numbers
        kept = logits.clone() if numbers.label_smoothing and numbers.softcap else None
        losses, found = self.split.losses(logits, target, overwrite=need_dlogits)
        scale = torch.ones((), device=logits.device) if self.divisor is None else 1 / self.divisor
        one = losses if reduction == REDUCTIONS["none"] else (losses * scale).sum()
        if not need_dlogits:
            return one, None
        by = scale if by_token is None else by_token[rows]
        return one, found.gradient(logits, by, kept)


def _of_parts(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    dtype: torch.dtype | None,
) -> Tensor:
    """The loss of DTensors: of classes that are split over processes, tokens that are, or both."""
    from torch.distributed.tensor import DTensor

    from metalcore.ops.train import _vocabulary as vocabulary

    op = "linear_cross_entropy"
    expect_class_indices(op, target)
    expect_shape(op, "target", target, hidden.shape[:-1])
    expect_reduction(op, reduction)
    expect_smoothing(op, label_smoothing)
    places = vocabulary.places_of(hidden, hidden.dim() - 1, weight)
    mesh = places.mesh
    x, w, b = vocabulary.local_operands(hidden, weight, bias, places)
    targets = vocabulary.moved(target, mesh, places.target).to_local()
    x, w, b = to_multiply(x, w, b)
    expect_linear(op, x, w, b)
    flat, rows = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    numbers = (float(label_smoothing), float(z_loss), float(softcap or 0.0), REDUCTIONS[reduction])
    how = vocabulary.Numbers(ignore_index, *numbers)
    kind = accumulate_dtype(flat)
    count = None
    if reduction == "mean":
        count = vocabulary.weight_of_targets(rows, None, ignore_index, places, kind)
        if flat.dtype == torch.float16:
            count = count / FLOAT16_SCALE
    classes = vocabulary.classes_of(places, weight.shape[0])
    share = _Share(vocabulary.Split(classes, None, how), count)
    loss = _LinearCrossEntropy.apply(flat, w, b, rows, share, *how)  # type: ignore[no-untyped-call]
    if reduction == "mean" and flat.dtype == torch.float16:
        loss = loss / FLOAT16_SCALE
    if dtype is not None or not is_autocast(x):
        loss = loss.to(dtype or hidden.dtype)
    if reduction == "none":
        return vocabulary.of_tokens(loss.view(targets.shape), target, places)
    return DTensor.from_local(loss, mesh, places.of_sum, run_check=False)


class _LinearCrossEntropy(torch.autograd.Function):
    """Gives away the gradients that its forward pass computed; autograd would copy outputs.

    So it is no op: what an op saves for its backward pass stays alive while that runs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        share: _Share | None,
        *how: Any,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.how, ctx.share = how, share
        # one loss per token: what they are weighted by is not known before the backward pass
        ctx.ready = None
        if how[-1] != REDUCTIONS["none"] and any(ctx.needs_input_grad[:3]):
            wanted = ctx.needs_input_grad[:3]
            loss, ctx.ready = _run(hidden, weight, bias, target, how, share, wanted)
        else:
            loss, _ = _run(hidden, weight, bias, target, how, share, None)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        hidden, weight, bias, target = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return *_to_differentiate_again(ctx, dloss), *(None,) * (2 + len(ctx.how))
        by_token = dloss if ctx.how[-1] == REDUCTIONS["none"] else None
        # what was computed is given away; a second backward pass computes it again
        grads, ctx.ready = ctx.ready, None
        if grads is None:
            wanted = ctx.needs_input_grad[:3]
            _, grads = _run(hidden, weight, bias, target, ctx.how, ctx.share, wanted, by_token)
        if by_token is None and not is_one(dloss):
            grads = tuple(g if g is None else g.mul_(dloss) for g in grads)
        return *grads, *(None,) * (2 + len(ctx.how))


def _to_differentiate_again(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients, with a graph of their own."""
    expect(
        ctx.share is None,
        "linear_cross_entropy",
        "DTensors have no second derivative here; take cross_entropy(linear(hidden, weight))",
    )
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
    share: _Share | None,
    wanted: tuple[bool, bool, bool] | None,
    by_token: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The loss, and the gradients that are wanted: of the loss, or weighted `by_token`."""
    *rest, reduction = how
    count = None
    if share is not None:
        count = share.divisor
    elif reduction == REDUCTIONS["mean"]:
        count = (target != rest[0]).sum(dtype=accumulate_dtype(hidden))
        if hidden.dtype == torch.float16:
            count = count / FLOAT16_SCALE

    def loss(logits: Tensor, rows: slice, need_dlogits: bool) -> tuple[Tensor, Tensor | None]:
        if share is not None:
            return share.loss(logits, target[rows], reduction, by_token, rows, need_dlogits)
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
