# SPDX-License-Identifier: MIT
"""Cross entropy of logits and class indices, with its gradient computed along with the loss.

y = softcap * tanh(x / softcap), or x;  lse = log(sum(exp(y)));  e = label_smoothing
loss = (1 - e) w_t (lse - y_t) + e / n * sum_j w_j (lse - y_j) + z_loss * w_t * lse^2
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from metalcore._autocast import is_autocast
from metalcore._autograd import pull_back
from metalcore._check import (
    are_transformed,
    dtype_name,
    expect,
    expect_float,
    expect_float_or_none,
    expect_same_device,
    expect_shape,
    expect_tensors,
    is_eager,
    may_be_differentiated,
    refuse,
    shape,
)
from metalcore._op import Example, Op, accumulate
from metalcore._route import Rows
from metalcore._sharding import are_sharded


def _letters(*args: Any) -> str:
    denominator, reduction = args[3], args[8]
    if reduction == REDUCTIONS["mean"] and denominator is None:
        # the count of all targets that count is needed, and no process has it
        return "NV, N, V, -> , NV"
    return "nV, n, V, -> n, nV" if reduction == REDUCTIONS["none"] else "nV, n, V, -> , nV"


def _letters_in_place(*args: Any) -> str:
    return _letters(*args).removesuffix("V")


forward = Op(
    "cross_entropy(Tensor logits, Tensor target, Tensor? weight, Tensor? denominator,"
    " int ignore_index, float label_smoothing, float z_loss, float softcap, int reduction,"
    " bool need_dlogits) -> (Tensor loss, Tensor dlogits)",
    sharding=_letters,
)
in_place = Op(
    "cross_entropy_(Tensor(a!) logits, Tensor target, Tensor? weight, Tensor? denominator,"
    " int ignore_index, float label_smoothing, float z_loss, float softcap, int reduction)"
    " -> (Tensor loss, Tensor lse)",
    sharding=_letters_in_place,
)

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
# A mean over tokens makes gradients small, and they are rounded before a loss scale can make them
# large: float16 ones are kept times this, which the backward pass takes off again.
FLOAT16_SCALE = 256.0

_route = Rows(
    "cross_entropy", "", lambda x: (x, torch.arange(len(x)) % x.shape[1]), torch_rounds="all"
)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    inplace_backward: bool = False,
) -> Tensor:
    """Cross entropy, equal to `torch.nn.functional.cross_entropy` for class indices.

    Args:
        input: logits, [C], [N, C] or [N, C, d1, ...]. Of a DTensor any dimension may be sharded,
            classes too: three numbers per token are exchanged, and the loss is a DTensor.
        target: class indices, int64, of the shape of `input` without C. One that is neither a class
            nor `ignore_index` is an IndexError on the CPU, and makes the loss NaN on a GPU.
        weight: of each class, [C]; it gets no gradient.
        ignore_index: targets that count for nothing.
        reduction: "mean" (over the weights of the targets), "sum" or "none".
        label_smoothing: from 0 to 1, the share of the target that all classes get.
        z_loss: adds `z_loss * w_t * log(sum(exp(logits)))^2` to each loss.
        softcap: replaces the logits by `softcap * tanh(logits / softcap)`.
        inplace_backward: the memory of `input` may become the gradient, which halves the memory.
            Its values are lost, and backward works once. Without a recorded gradient, and under
            `torch.compile` and function transforms, nothing is overwritten.

    Returns:
        The loss, a scalar or of the shape of `target`, in the dtype of `input` (float32 under
        autocast). Sums are kept in float32 (float64 for float64).

    Example:
        >>> loss = metalcore.cross_entropy(torch.randn(8, 1000), torch.randint(1000, (8,)))
    """
    _expect(input, target, weight, reduction, label_smoothing, softcap)
    numbers = (float(label_smoothing), float(z_loss), float(softcap or 0.0), REDUCTIONS[reduction])
    if are_sharded((input,)):
        from metalcore.ops.train._vocabulary import Numbers, cross_entropy_of_parts

        how = Numbers(ignore_index, *numbers)
        return cross_entropy_of_parts(input, target, weight, min(1, input.dim() - 1), how)
    rows = _as_rows(input)
    if softcap is None and not z_loss and _route.prefers_torch(rows, weight):
        options = {"ignore_index": ignore_index, "reduction": reduction}
        return _route.by_torch(
            F.cross_entropy, input, target, weight, label_smoothing=label_smoothing, **options
        )
    flat = target.reshape(-1)
    recorded = may_be_differentiated(rows)
    scaled = recorded and reduction == "mean" and input.dtype == torch.float16
    denominator = _count(flat, weight, ignore_index) / FLOAT16_SCALE if scaled else None
    args = (rows, flat, weight, denominator, ignore_index, *numbers)
    plain = is_eager() and not are_transformed()
    if inplace_backward and recorded and plain and rows.is_contiguous():
        loss = cast(Tensor, _OverLogits.apply(*args))  # type: ignore[no-untyped-call]
    else:
        loss = cast(Tensor, forward(*args, recorded)[0])
    if scaled:
        loss = loss / FLOAT16_SCALE
    if loss.dtype != input.dtype and not is_autocast(input):
        loss = loss.to(input.dtype)
    return loss if loss.shape == target.shape or reduction != "none" else loss.view(target.shape)


def _as_rows(input: Tensor) -> Tensor:
    """`input` as [rows, classes]."""
    if input.dim() == 1:
        return input[None]
    return input if input.dim() == 2 else input.movedim(1, -1).reshape(-1, input.shape[1])


def _count(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """The weights of all targets that count."""
    counts = target != ignore_index
    if weight is None:
        return counts.sum(dtype=torch.float32)
    return (weight.detach().float()[torch.where(counts, target, 0)] * counts).sum()


def _expect(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    label_smoothing: float,
    softcap: float | None,
) -> None:
    op = "cross_entropy"
    expect_float(op, input=input)
    expect_float_or_none(op, weight=weight)
    expect_tensors(op, target=target)
    expect_same_device(op, input=input, target=target, weight=weight)
    if input.dim() == 0:
        refuse(op, f"input must be [C], [N, C] or [N, C, ...], got {shape(input)}")
    expect_class_indices(op, target)
    *batch, classes = input.shape[:2]
    expect_shape(op, "target", target, (*batch, *input.shape[2:]))
    expect_shape(op, "weight", weight, (classes,))
    expect_reduction(op, reduction)
    expect_smoothing(op, label_smoothing)
    if not (softcap is None or softcap > 0):
        refuse(op, f"softcap must be greater than 0, got {softcap}")


def expect_class_indices(op: str, target: Tensor) -> None:
    if target.is_floating_point():
        raise TypeError(
            f"{op}: target must be class indices (int64), got {dtype_name(target.dtype)}; "
            "for class probabilities use torch.nn.functional.cross_entropy"
        )
    if target.dtype != torch.int64:
        raise TypeError(
            f"{op}: target must be int64, got {dtype_name(target.dtype)}; convert with .long()"
        )


def expect_reduction(op: str, reduction: str) -> None:
    if reduction not in REDUCTIONS:
        refuse(op, f"reduction must be none, mean or sum, got {reduction}")


def expect_smoothing(op: str, label_smoothing: float) -> None:
    if not 0 <= label_smoothing <= 1:
        refuse(op, f"label_smoothing must be from 0 to 1, got {label_smoothing}")


class _OverLogits(torch.autograd.Function):
    """cross_entropy whose gradient takes the memory of the logits.

    It is no op: for torch, one that overwrites an input cannot have saved it.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, *rest: Any) -> Tensor:
        ctx.dlogits = logits.detach()
        ctx.reduction = rest[-1]
        loss: Tensor = in_place(ctx.dlogits, *rest)[0]
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        expect(
            not torch.is_grad_enabled(),
            "cross_entropy",
            "inplace_backward has no second derivative; leave it out for create_graph=True",
        )
        dlogits, ctx.dlogits = ctx.dlogits, None
        expect(
            dlogits is not None,
            "cross_entropy",
            "inplace_backward gives its gradient once; leave it out to call backward again",
        )
        if not is_one(dloss):
            dlogits.mul_(dloss[:, None] if ctx.reduction == REDUCTIONS["none"] else dloss)
        return dlogits, *(None,) * 8


def is_one(dloss: Tensor) -> bool:
    """Whether the loss is what is differentiated itself, where that can be told for free."""
    if not is_eager():
        return False
    real = type(dloss) is Tensor and dloss.dim() == 0 and dloss.device.type == "cpu"
    return real and dloss.item() == 1.0


@forward.reference
def _(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    denominator: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: int,
    need_dlogits: bool,
) -> tuple[Tensor, Tensor]:
    x = accumulate(logits)
    y = softcap * torch.tanh(x / softcap) if softcap > 0 else x
    n = x.shape[-1]
    lse = torch.logsumexp(y, -1)
    valid = target != ignore_index
    own = torch.where(valid, target, 0)[:, None]
    w = x.new_ones(n) if weight is None else accumulate(weight.detach()).to(x.dtype)
    w_own = torch.where(valid, w[own[:, 0]], 0)
    even = valid.to(x.dtype) * (label_smoothing / max(1, n))
    nll = (1 - label_smoothing) * w_own
    losses = nll * (lse - y.gather(1, own)[:, 0]) + z_loss * w_own * lse.square()
    losses = losses + even * (w.sum() * lse - (y * w).sum(-1))
    # an ignored row may hold anything
    losses = torch.where(valid, losses, 0)
    divisor = x.new_ones(())
    if reduction == REDUCTIONS["mean"]:
        divisor = w_own.sum() if denominator is None else denominator
    loss = losses if reduction == REDUCTIONS["none"] else losses.sum() / divisor
    if not need_dlogits:
        return loss, logits.new_empty(0)
    mass = nll + even * w.sum() + 2 * z_loss * w_own * lse
    d = torch.exp(y - lse[:, None]) * mass[:, None] - even[:, None] * w
    d = d - torch.zeros_like(d).scatter(1, own, nll[:, None])
    if softcap > 0:
        d = d * (1 - (y / softcap).square())
    d = torch.where(valid[:, None], d / divisor, 0).to(logits.dtype)
    return loss, d.contiguous()


@in_place.reference
def _(logits: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    x = accumulate(logits)
    softcap = args[6]
    lse = torch.logsumexp(softcap * torch.tanh(x / softcap) if softcap > 0 else x, -1)
    loss, dlogits = forward.meaning(logits, *args, True)
    logits.copy_(dlogits)
    return loss, torch.where(args[0] != args[3], lse, 0)


@forward.example
def _(dtype: torch.dtype) -> Example:
    target = torch.tensor([3, -100, 999, 0, 500])
    logits, weight = torch.randn(5, 1000).to(dtype), torch.rand(1000).to(dtype)
    args = (logits, target, weight, None, -100, 0.1, 1e-3, 20.0, 1, True)
    return Example(args, reduces_over=1000)


@in_place.example
def _(dtype: torch.dtype) -> Example:
    args, over = forward.samples[0](dtype)
    return Example(args[:-1], over)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, weight, denominator, *ctx.how, ctx.has_dlogits = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        logits, target, weight, denominator, output[1] if ctx.has_dlogits else None
    )


@forward.gradient(save=_save)
def _(ctx: Any, dloss: Tensor | None, ddlogits: Tensor | None) -> tuple[Tensor | None, ...]:
    logits, target, weight, denominator, dlogits = ctx.saved_tensors
    rest = (target, weight, denominator, *ctx.how, True)
    dx = None
    if dloss is not None:
        if dlogits is None:
            dlogits = forward(logits, *rest)[1]
        if torch.is_grad_enabled() or not is_one(dloss):
            by_row = dloss.dim() > 0
            dx = (dlogits * (dloss[:, None] if by_row else dloss)).to(logits.dtype)
        else:
            dx = dlogits
    if ddlogits is not None and ctx.has_dlogits:
        # of dlogits, by differentiating the reference
        (second,) = pull_back(lambda x: forward.meaning(x, *rest)[1:], [logits], [ddlogits])
        dx = second if dx is None else dx + second
    return dx, *(None,) * 9
