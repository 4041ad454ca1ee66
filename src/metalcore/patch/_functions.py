# SPDX-License-Identifier: MIT
"""What takes the place of torch's activations, norms, softmax, losses, embedding bags and Adam.

A call that is not taken costs what is in front of `original(...)`, so that is short: the class of
the tensor, then its size. All else is asked of calls that are large enough.
"""

import sys
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metalcore._op import Op
from metalcore._policy import policy
from metalcore.ops.train._elementwise import in_memory_order
from metalcore.ops.train.cross_entropy import cross_entropy as our_cross_entropy
from metalcore.ops.train.embedding_bag import MODES
from metalcore.ops.train.embedding_bag import embedding_bag as our_embedding_bag
from metalcore.patch._replace import (
    ABSENT,
    PLAIN,
    Function,
    compiling,
    compute,
    may_replace,
    replaces,
)

_silu, _gelu, _softmax = Op.all["silu"], Op.all["gelu"], Op.all["softmax"]
_rms_norm, _layer_norm, _adamw = Op.all["rms_norm"], Op.all["layer_norm"], Op.all["adamw_step"]

# Sizes that are taken, `[override]` of the op's TOML file; those for gradients are the larger ones.
SILU_FROM: int = policy("silu", "override")["values_from"]
SILU_GRADIENT_FROM: int = policy("silu", "override")["gradient_from"]
GELU_FROM: int = policy("gelu", "override")["values_from"]
GELU_GRADIENT_FROM: int = policy("gelu", "override")["gradient_from"]
GELU_EXACT_FROM: int = policy("gelu", "override")["exact_from"]
SOFTMAX_FROM: int = policy("softmax", "override")["values_from"]
SOFTMAX_GRADIENT_FROM: int = policy("softmax", "override")["gradient_from"]
RMS_NORM_FROM: int = policy("rms_norm", "override")["values_from"]
LAYER_NORM_HALF_FROM: int = policy("layer_norm", "override")["half_from"]
LAYER_NORM_FROM: int = policy("layer_norm", "override")["values_from"]
CROSS_ENTROPY_FROM: int = policy("cross_entropy", "override")["values_from"]
CLASSES_FROM: int = policy("cross_entropy", "override")["classes_from"]
BAGS_FROM: int = policy("embedding_bag", "override")["indices_from"]
BAGS_GRADIENT_FROM: int = policy("embedding_bag", "override")["gradient_from"]

_LISTS = (tuple, list, torch.Size)
_REDUCTIONS = ("none", "mean", "sum")


def _records(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _is_laid_out_in_order(x: Tensor) -> bool:
    """Whether torch's elementwise kernels give a contiguous result for x: memory goes from the
    first dimension to the last, with or without gaps."""
    if x.is_contiguous():
        return True
    strides = [s for s, n in zip(x.stride(), x.shape, strict=True) if n != 1]
    return 0 not in strides and sorted(strides, reverse=True) == strides


def _keeps_order(x: Tensor) -> bool:
    """Whether `in_memory_order` lays the result out as torch does: also for a permutation of
    contiguous memory."""
    if _is_laid_out_in_order(x):
        return True
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    return 0 not in x.stride() and x.permute(order).is_contiguous()


@replaces("activations", (torch._C._nn, "silu"))
def _make_silu(original: Function) -> Function:
    def silu(input: Any, out: Any = None) -> Any:
        if (
            type(input) is Tensor
            and not compiling()
            and input.numel() >= SILU_FROM
            and out is None
            and (input.numel() >= SILU_GRADIENT_FROM or not _records(input))
            and may_replace("activations", input)
            and _keeps_order(input)
        ):
            return compute(in_memory_order, _silu, input)
        return original(input) if out is None else original(input, out=out)

    return silu


@replaces("activations", (F, "gelu"))
def _make_gelu(original: Function) -> Function:
    def gelu(input: Any = ABSENT, *, approximate: Any = "none", out: Any = None) -> Any:
        if (
            type(input) is Tensor
            and not compiling()
            and input.numel() >= GELU_FROM
            and out is None
            and _is_faster_gelu(input, approximate)
            and may_replace("activations", input)
            and _keeps_order(input)
        ):
            tanh = approximate == "tanh"
            return compute(in_memory_order, lambda x: _gelu(x, tanh), input)
        if approximate == "none" and out is None and input is not ABSENT:
            # torch takes long to read the name
            return original(input)
        args = () if input is ABSENT else (input,)
        named = {} if out is None else {"out": out}
        return original(*args, approximate=approximate, **named)

    return gelu


def _is_faster_gelu(x: Tensor, approximate: Any) -> bool:
    if approximate == "tanh":
        return x.numel() >= GELU_GRADIENT_FROM or not _records(x)
    return approximate == "none" and x.dtype is not torch.float32 and x.numel() >= GELU_EXACT_FROM


@replaces("softmax", (torch, "softmax"), (Tensor, "softmax"), (torch.special, "softmax"))
def _make_softmax(original: Function) -> Function:
    def softmax(
        input: Any = ABSENT,
        dim: Any = ABSENT,
        dtype: Any = None,
        out: Any = ABSENT,
        axis: Any = ABSENT,
    ) -> Any:
        if (
            type(input) is Tensor
            and not compiling()
            and input.numel() >= SOFTMAX_FROM
            and out is axis is ABSENT
            and _takes_softmax(input, dim, dtype)
        ):
            return compute(_softmax, input if dtype is None else input.to(dtype), None, 1.0, False)
        if out is axis is ABSENT and dim is not ABSENT:
            return original(input, dim) if dtype is None else original(input, dim, dtype)
        args = [a for a in (input, dim) if a is not ABSENT]
        named = {"dtype": dtype, "out": out, "axis": axis}
        return original(*args, **{n: v for n, v in named.items() if v is not ABSENT})

    return softmax


def _takes_softmax(x: Tensor, dim: Any, dtype: Any) -> bool:
    last = x.dim() - 1
    return (
        type(dim) is int
        and last >= 0
        and dim in (-1, last)
        and (dtype is None or (type(dtype) is torch.dtype and dtype.is_floating_point))
        and (x.numel() >= SOFTMAX_GRADIENT_FROM or not _records(x))
        and may_replace("softmax", x)
    )


def _normalised(x: Tensor, sizes: Any) -> int:
    """How many dimensions are normalised over; 0 for what is left to torch."""
    if type(sizes) not in _LISTS or not sizes or x.shape[-len(sizes) :] != tuple(sizes):
        return 0
    return len(sizes)


@replaces("normalization", (torch, "rms_norm"))
def _make_rms_norm(original: Function) -> Function:
    def rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Any:
        if type(input) is Tensor and not compiling() and input.numel() >= RMS_NORM_FROM:
            rank = _normalised(input, normalized_shape)
            if (
                rank
                and (weight is None or weight.shape == tuple(normalized_shape))
                and (eps is None or (type(eps) is float and eps > 0))
                and may_replace("normalization", input, weight)
                and _is_laid_out_in_order(input)
            ):
                return compute(_normalise, _rms_norm, rank, input, weight, _eps(input, eps), 0.0)
        return original(input, normalized_shape, weight, eps)

    return rms_norm


def _eps(x: Tensor, eps: float | None) -> float:
    if eps is not None:
        return eps
    return torch.finfo(torch.float64 if x.dtype is torch.float64 else torch.float32).eps


def _normalise(op: Op, rank: int, x: Tensor, *rest: Any) -> Tensor:
    if rank == 1:
        return op(x, *rest)[0]  # type: ignore[no-any-return]
    flat = (r.flatten() if isinstance(r, Tensor) else r for r in rest)
    y: Tensor = op(x.flatten(-rank), *flat)[0]
    return y.view(x.shape)


@replaces("normalization", (torch, "layer_norm"))
def _make_layer_norm(original: Function) -> Function:
    def layer_norm(
        input: Any,
        normalized_shape: Any,
        weight: Any = None,
        bias: Any = None,
        eps: Any = 1e-5,
        cudnn_enable: Any = True,
    ) -> Any:
        if type(input) is Tensor and not compiling() and input.numel() >= LAYER_NORM_HALF_FROM:
            rank = _normalised(input, normalized_shape)
            size = tuple(normalized_shape) if rank else None
            if (
                rank
                and (input.itemsize == 2 or input.numel() >= LAYER_NORM_FROM)
                and (weight is None or weight.shape == size)
                and (bias is None or bias.shape == size)
                and type(eps) is float
                and eps > 0
                and may_replace("normalization", input, weight, bias)
            ):
                return compute(_normalise, _layer_norm, rank, input, weight, bias, eps)
        return original(input, normalized_shape, weight, bias, eps, cudnn_enable)

    return layer_norm


@replaces("losses", (torch._C._nn, "cross_entropy_loss"))
def _make_cross_entropy(original: Function) -> Function:
    def cross_entropy_loss(
        input: Any,
        target: Any,
        weight: Any = None,
        reduction: Any = 1,
        ignore_index: Any = -100,
        label_smoothing: Any = 0.0,
    ) -> Any:
        if type(input) is Tensor and not compiling() and input.numel() >= CROSS_ENTROPY_FROM:
            args = (input, target, weight, reduction, ignore_index, label_smoothing)
            if _takes_cross_entropy(*args):
                try:
                    return compute(_cross_entropy, *args)
                except IndexError:
                    # torch says it in its own words
                    return original(*args)
        return original(input, target, weight, reduction, ignore_index, label_smoothing)

    return cross_entropy_loss


def _takes_cross_entropy(
    x: Tensor, target: Any, weight: Any, reduction: Any, ignore_index: Any, smoothing: Any
) -> bool:
    return (
        type(target) is Tensor
        and x.dim() == 2
        and x.shape[1] >= CLASSES_FROM
        and target.shape == x.shape[:1]
        and target.dtype is torch.int64
        and target.device == x.device
        # A gradient that is computed before it is scaled up is zero in float16 too often.
        and not (x.dtype is torch.float16 and x.requires_grad)
        and (weight is None or (weight.shape == x.shape[1:] and not weight.requires_grad))
        and reduction in (0, 1, 2)
        and type(smoothing) is float
        and 0 <= smoothing <= 1
        and may_replace("losses", x, weight)
    )


def _cross_entropy(
    x: Tensor, target: Tensor, weight: Any, reduction: int, ignore_index: int, smoothing: float
) -> Tensor:
    return our_cross_entropy(
        x,
        target,
        weight,
        ignore_index=ignore_index,
        reduction=_REDUCTIONS[reduction],
        label_smoothing=smoothing,
    )


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
        if type(input) is Tensor and not compiling() and input.numel() >= BAGS_FROM:
            args = (
                *(input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse),
                *(per_sample_weights, include_last_offset, padding_idx),
            )
            if _takes_bags(*args):
                try:
                    return compute(our_embedding_bag, *args)
                except (IndexError, ValueError):
                    # torch says it in its own words
                    return original(*args)
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
    # torch's sums are ahead but for their gradient
    if (_records(weight) or mode == "sum") and not (
        _records(weight) and input.numel() >= BAGS_GRADIENT_FROM
    ):
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
        and not (mode == "max" and (by_freq or sparse))
        and (
            per_sample_weights is None
            or (mode == "sum" and per_sample_weights.shape == input.shape)
        )
        and (padding_idx is None or (type(padding_idx) is int and -rows <= padding_idx < rows))
        and may_replace("embedding_bag", weight, per_sample_weights)
    )


_EXCLUDED = ("capturable", "differentiable", "grad_scale", "found_inf", "has_complex", "fused")


# torch.optim hides these modules behind functions of their names.
_ADAM, _ADAMW = (sys.modules[f"torch.optim.{name}"] for name in ("adam", "adamw"))


@replaces("optimizers", (_ADAM, "adam"), (_ADAMW, "adam"))
def _make_adam(original: Function) -> Function:
    def adam(params: Any, *lists: Any, **how: Any) -> None:
        if not compiling() and params and len(lists) == 5 and _takes_adam(params, lists, how):
            args = (float(how[name]) for name in ("lr", "beta1", "beta2", "eps", "weight_decay"))
            rest = (bool(how["maximize"]), 1.0, None, 0.0, False, 0)
            compute(_adamw, params, *lists, *args, *rest)
        else:
            original(params, *lists, **how)

    return adam


def _takes_adam(params: Any, lists: Sequence[Any], how: dict[str, Any]) -> bool:
    grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps = lists
    numbers = [how.get(name) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")]
    if (
        any(how.get(name) for name in _EXCLUDED)
        or any(type(n) not in (int, float) for n in numbers)
        or not (how.get("decoupled_weight_decay") or how["weight_decay"] == 0)
        or torch.is_grad_enabled()
        or params[0].dtype not in (torch.float32, torch.float64)
        or any(step.device.type != "cpu" for step in steps)
    ):
        return False
    moments = [exp_avgs, exp_avg_sqs, *([max_exp_avg_sqs] if how["amsgrad"] else [])]
    return may_replace("optimizers", params[0], *chain(params[1:], grads, *moments))
