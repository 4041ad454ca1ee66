# SPDX-License-Identifier: MIT
"""What takes the place of torch's cross entropy, embedding bags and Adam."""

import sys
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metalcore import _torch
from metalcore._autocast import is_autocast
from metalcore._op import Op
from metalcore._route import Route
from metalcore.ops.train.embedding_bag import MODES
from metalcore.ops.train.embedding_bag import embedding_bag as our_embedding_bag
from metalcore.patch._replace import (
    ABSENT,
    PLAIN,
    Function,
    compiling,
    compute,
    compute_or_explain,
    is_ours,
    may_replace,
    records,
    replaces,
)

_cross_entropy, _adamw = Op.all["cross_entropy"], Op.all["adamw_step"]


@replaces("losses", (_torch.nn_functions, "cross_entropy_loss"))
def _make_cross_entropy(original: Function) -> Function:
    route = Route.all["cross_entropy"]

    def cross_entropy_loss(
        input: Any,
        target: Any,
        weight: Any = None,
        reduction: Any = ABSENT,
        ignore_index: Any = -100,
        label_smoothing: Any = 0.0,
    ) -> Any:
        if is_ours("losses", route, input, weight):
            args = (input, target, weight, reduction, ignore_index, label_smoothing)
            if _takes_cross_entropy(*args):
                return compute_or_explain(_loss, original, *args)
        if reduction is ABSENT:
            rest = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
            return original(input, target, weight, **rest)
        return original(input, target, weight, reduction, ignore_index, label_smoothing)

    return cross_entropy_loss


def _takes_cross_entropy(
    x: Tensor, target: Any, weight: Any, reduction: Any, ignore_index: Any, smoothing: Any
) -> bool:
    return (
        type(target) is Tensor
        and x.dim() == 2
        and target.shape == x.shape[:1]
        and target.dtype is torch.int64
        and target.device == x.device
        # A gradient that is computed before it is scaled up is zero in float16 too often.
        and not (x.dtype is torch.float16 and x.requires_grad)
        and reduction in (0, 1, 2)
        and type(smoothing) is float
        and 0 <= smoothing <= 1
        and (weight is None or (weight.shape == x.shape[1:] and not weight.requires_grad))
    )


def _loss(
    x: Tensor, target: Tensor, weight: Any, reduction: int, ignore_index: int, smoothing: float
) -> Tensor:
    plain = (None, ignore_index, smoothing, 0.0, 0.0, reduction)
    loss: Tensor = _cross_entropy(x, target, weight, *plain, records(x))[0]
    return loss if is_autocast(x) else loss.to(x.dtype)


@replaces("embedding_bag", (F, "embedding_bag"))
def _make_embedding_bag(original: Function) -> Function:
    def embedding_bag(
        input: Any,
        weight: Any,
        offsets: Any = None,
        max_norm: Any = None,
        norm_type: Any = 2,
        scale_grad_by_freq: Any = False,
        mode: Any = "mean",
        sparse: Any = False,
        per_sample_weights: Any = None,
        include_last_offset: Any = False,
        padding_idx: Any = None,
    ) -> Any:
        if type(input) is Tensor and not compiling():
            args = (
                *(input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse),
                *(per_sample_weights, include_last_offset, padding_idx),
            )
            if _takes_bags(*args):
                return compute_or_explain(our_embedding_bag, original, *args)
        return original(
            input,
            weight,
            offsets,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,
            per_sample_weights,
            include_last_offset,
            padding_idx,
        )

    return embedding_bag


def _takes_bags(
    input: Tensor,
    weight: Any,
    offsets: Any,
    max_norm: Any,
    norm_type: Any,
    by_freq: bool,
    mode: Any,
    sparse: bool,
    per_sample_weights: Any,
    include_last_offset: bool,
    padding_idx: Any,
) -> bool:
    if type(weight) not in PLAIN or weight.dim() != 2 or mode not in MODES:
        return False
    # torch's sums are ahead but for their gradient, and its gradient by frequency is another one
    if by_freq or (mode == "sum" and not records(weight)):
        return False
    bags = [input] if offsets is None else [input, offsets]
    rows = weight.shape[0]
    return (
        input.dim() == (2 if offsets is None else 1)
        and all(type(t) is Tensor and t.dtype is input.dtype for t in bags)
        and input.dtype in (torch.int64, torch.int32)
        and all(t.device == weight.device for t in bags)
        and (offsets is None or offsets.dim() == 1)
        and not (offsets is None and include_last_offset)
        and not (mode == "max" and sparse)
        and (padding_idx is None or (type(padding_idx) is int and -rows <= padding_idx < rows))
        and may_replace("embedding_bag", weight, per_sample_weights)
        and (
            per_sample_weights is None
            or (mode == "sum" and per_sample_weights.shape == input.shape)
        )
    )


# torch.optim hides these modules behind functions of their names.
_ADAM, _ADAMW = (sys.modules[f"torch.optim.{name}"] for name in ("adam", "adamw"))


_NUMBERS = ("lr", "beta1", "beta2", "eps", "weight_decay")
_OFF = ("capturable", "differentiable", "grad_scale", "found_inf", "has_complex")
_KNOWN = {*_NUMBERS, *_OFF, "amsgrad", "maximize", "foreach", "fused", "decoupled_weight_decay"}


@replaces("optimizers", (_ADAM, "adam"), (_ADAMW, "adam"))
def _make_adam(original: Function) -> Function:
    def adam(params: Any, *lists: Any, **how: Any) -> None:
        usual = params and len(lists) == 5 and not how.get("fused")
        if usual and not compiling() and _takes_adam(params, lists, how):
            args = (float(how[name]) for name in _NUMBERS)
            rest = (bool(how["maximize"]), 1.0, None, 0.0, False, 0)
            compute(_adamw, params, *lists, *args, *rest)
        else:
            original(params, *lists, **how)

    return adam


def _takes_adam(params: Any, lists: Sequence[Any], how: dict[str, Any]) -> bool:
    grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps = lists
    if (
        any(how.get(name) is not None and how[name] is not False for name in _OFF)
        or not {"amsgrad", "maximize"} <= how.keys() <= _KNOWN
        or any(type(how.get(name)) not in (int, float) for name in _NUMBERS)
        or not (how.get("decoupled_weight_decay") or how["weight_decay"] == 0)
        or torch.is_grad_enabled()
        or params[0].dtype not in (torch.float32, torch.float64)
        or any(step.device.type != "cpu" for step in steps)
        or len(max_exp_avg_sqs) != (len(params) if how["amsgrad"] else 0)
    ):
        return False
    others = chain(params[1:], grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs)
    return may_replace("optimizers", params[0], *others)
