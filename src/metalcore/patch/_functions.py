# SPDX-License-Identifier: MIT
"""What takes the place of torch's activations, norms and softmax."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metalcore import _torch
from metalcore._op import Op
from metalcore._route import Route
from metalcore.ops.train._elementwise import in_memory_order
from metalcore.patch._replace import ABSENT, Function, compute, is_ours, replaces

_silu, _gelu, _softmax = Op.all["silu"], Op.all["gelu"], Op.all["softmax"]
_rms_norm, _layer_norm = Op.all["rms_norm"], Op.all["layer_norm"]

_LISTS = (tuple, list, torch.Size)


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


@replaces("activations", (_torch.nn_functions, "silu"))
def _make_silu(original: Function) -> Function:
    route = Route.all["silu"]

    def silu(input: Any, out: Any = None) -> Any:
        if out is None and is_ours("activations", route, input) and _keeps_order(input):
            return compute(in_memory_order, _silu, input)
        return original(input) if out is None else original(input, out=out)

    return silu


@replaces("activations", (F, "gelu"))
def _make_gelu(original: Function) -> Function:
    routes = {kind: Route.all[f"gelu.{kind}"] for kind in ("none", "tanh")}

    def gelu(input: Any = ABSENT, *, approximate: Any = "none", out: Any = None) -> Any:
        route = routes.get(approximate) if out is None and type(approximate) is str else None
        if route and is_ours("activations", route, input) and _keeps_order(input):
            tanh = approximate == "tanh"
            return compute(in_memory_order, lambda x: _gelu(x, tanh), input)
        args = () if input is ABSENT else (input,)
        named = {} if out is None else {"out": out}
        return original(*args, approximate=approximate, **named)

    return gelu


@replaces("softmax", (torch, "softmax"), (Tensor, "softmax"), (torch.special, "softmax"))
def _make_softmax(original: Function) -> Function:
    route = Route.all["softmax"]

    def softmax(
        input: Any = ABSENT,
        dim: Any = ABSENT,
        dtype: Any = None,
        out: Any = ABSENT,
        axis: Any = ABSENT,
    ) -> Any:
        if (
            out is axis is ABSENT
            and is_ours("softmax", route, input)
            and type(dim) is int
            and dim in (-1, input.dim() - 1)
            and (dtype is None or (type(dtype) is torch.dtype and dtype.is_floating_point))
        ):
            return compute(_softmax, input if dtype is None else input.to(dtype), None, 1.0, False)
        if out is axis is ABSENT and dim is not ABSENT:
            return original(input, dim) if dtype is None else original(input, dim, dtype)
        args = [a for a in (input, dim) if a is not ABSENT]
        named = {"dtype": dtype, "out": out, "axis": axis}
        return original(*args, **{n: v for n, v in named.items() if v is not ABSENT})

    return softmax


def _normalised(x: Tensor, sizes: Any) -> int:
    """How many dimensions are normalised over; 0 for what is left to torch."""
    if type(sizes) not in _LISTS or not sizes or x.shape[-len(sizes) :] != tuple(sizes):
        return 0
    return len(sizes)


@replaces("normalization", (torch, "rms_norm"))
def _make_rms_norm(original: Function) -> Function:
    route = Route.all["rms_norm"]

    def rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Any:
        if is_ours("normalization", route, input, weight):
            rank = _normalised(input, normalized_shape)
            if (
                rank
                and (eps is None or (type(eps) is float and eps > 0))
                and (weight is None or weight.shape == tuple(normalized_shape))
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
    route = Route.all["layer_norm"]

    def layer_norm(
        input: Any,
        normalized_shape: Any,
        weight: Any = None,
        bias: Any = None,
        eps: Any = 1e-5,
        cudnn_enable: Any = True,
    ) -> Any:
        if is_ours("normalization", route, input, weight, bias):
            rank = _normalised(input, normalized_shape)
            size = tuple(normalized_shape) if rank else None
            if (
                rank
                and type(eps) is float
                and eps > 0
                and (weight is None or weight.shape == size)
                and (bias is None or bias.shape == size)
            ):
                return compute(_normalise, _layer_norm, rank, input, weight, bias, eps)
        return original(input, normalized_shape, weight, bias, eps, cudnn_enable)

    return layer_norm
