# SPDX-License-Identifier: MIT
"""Norms of a model: recognised by what they compute, replaced by `rms_norm` and `layer_norm`."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metalcore._check import FLOATS
from metalcore._sharding import is_dtensor
from metalcore.ops.train.layer_norm import layer_norm
from metalcore.ops.train.rms_norm import rms_norm
from metalcore.ops.train.swiglu import swiglu
from metalcore.ops.xlstm.multi_head_norm import multi_head_norm
from metalcore.patch.probe import DTYPES, agrees, ask, stand_in
from metalcore.patch.swap import Swapped, restore, swap

_EPS = ("variance_epsilon", "eps", "epsilon")
# enough for a formula, where the layer does not say how wide its rows are
_WIDTH = 24


class How(NamedTuple):
    """The variant of a norm: the attribute that holds eps, what is added to the weight (RMSNorm),
    and whether a weight of another dtype than x leaves the result in that of x."""

    eps: str
    weight_offset: float
    keeps_dtype: bool


class _Norm(Swapped):
    def fits(self, x: Any, how: How) -> bool:
        weight: Tensor | None = getattr(self, "weight", None)
        if not isinstance(x, Tensor) or x.dtype not in FLOATS:
            return False
        if weight is None:
            return True
        fits = type(weight) is nn.Parameter or type(weight) is Tensor
        fits = fits or (is_dtensor(weight) and is_dtensor(x))
        return fits and (weight.dtype is x.dtype or how.keeps_dtype)


class RMSNorm(_Norm):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        how: How = self.origin.how
        if kwargs or len(args) != 1 or not self.fits(args[0], how):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        weight, eps = getattr(self, "weight", None), getattr(self, how.eps)
        return rms_norm(args[0], weight, eps, weight_offset=how.weight_offset)


class GatedRMSNorm(_Norm):
    """silu(gate) times the RMSNorm of x, for calls with both"""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        how: How = self.origin.how
        if kwargs or len(args) != 2 or not self.fits(args[0], how):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        x, gate = args
        if not isinstance(gate, Tensor) or gate.dtype is not x.dtype:
            return super().forward(x, gate)  # type: ignore[misc]
        weight, eps = getattr(self, "weight", None), getattr(self, how.eps)
        return swiglu(gate, rms_norm(x, weight, eps, weight_offset=how.weight_offset))


class LayerNorm(_Norm):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        how: How = self.origin.how
        if kwargs or len(args) != 1 or not self.fits(args[0], how):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        x = args[0]
        weight, bias = getattr(self, "weight", None), getattr(self, "bias", None)
        return layer_norm(x, x.shape[-1:], weight, bias, getattr(self, how.eps))


class _HeadNorm(_Norm):
    """Norms of the heads of x [B, T, H, D], side by side with one weight for all."""

    kind: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        how: How = self.origin.how
        if kwargs or len(args) != 1 or not self.fits(args[0], how) or args[0].dim() != 4:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        weight, bias = getattr(self, "weight", None), getattr(self, "bias", None)
        eps: float = getattr(self, how.eps)
        return multi_head_norm(args[0], weight, bias, kind=self.kind, eps=eps)


class HeadRMSNorm(_HeadNorm):
    kind = "rms"


class HeadLayerNorm(_HeadNorm):
    kind = "layer"


def is_candidate(module: nn.Module) -> bool:
    """Whether `module` looks like a norm: an eps, a weight and a bias at most, no parts."""
    return (
        _eps_name(module) is not None
        and next(module.children(), None) is None
        and set(module._parameters) <= {"weight", "bias"}
        and not list(module.buffers())
    )


def _eps_name(module: nn.Module) -> str | None:
    for name in _EPS:
        # torch.nn.RMSNorm has None for the machine epsilon
        if name in vars(module) and isinstance(getattr(module, name), (float, type(None))):
            return name
    return None


def recognise(module: nn.Module) -> tuple[type[Swapped], How] | str:
    """The kind and variant that compute what `module` does, or why there is none."""
    weight = module._parameters.get("weight")
    if weight is not None and weight.dim() != 1:
        return f"its weight has {weight.dim()} dimensions, ours one"
    if "forward" in vars(module):
        return "its forward was replaced already"
    eps_name = _eps_name(module)
    assert eps_name is not None
    has_bias = module._parameters.get("bias") is not None
    plain = [(LayerNorm, 0.0)] if has_bias else [(RMSNorm, 0.0), (RMSNorm, 1.0), (LayerNorm, 0.0)]
    gated = [] if has_bias else [(GatedRMSNorm, 0.0), (GatedRMSNorm, 1.0)]
    for inputs, kinds in ((1, plain), (2, gated)):
        pairs = [(dtype, dtype) for dtype in DTYPES]
        answers = ask(partial(_answers, module, inputs, pairs)) or []
        for kind, offset in kinds:
            how = How(eps_name, offset, True)
            if answers and _agree(kind, how, answers):
                mixed = ask(partial(_answers, module, inputs, [(torch.bfloat16, torch.float32)]))
                keeps_dtype = bool(mixed) and mixed[0][2].dtype is torch.bfloat16
                return kind, how._replace(keeps_dtype=keeps_dtype)
    return _of_heads(module, eps_name)


def _of_heads(module: nn.Module, eps_name: str) -> tuple[type[Swapped], How] | str:
    """The same of a norm of heads, whose number and size it says."""
    heads, size = getattr(module, "num_heads", None), getattr(module, "head_dim", None)
    if isinstance(heads, int) and isinstance(size, int):
        pairs = [(dtype, dtype) for dtype in DTYPES]
        answers = ask(partial(_answers, module, 1, pairs, (heads, size))) or []
        for kind in (HeadLayerNorm, HeadRMSNorm):
            how = How(eps_name, 0.0, False)
            if answers and _agree(kind, how, answers):
                return kind, how
    return "computes neither an RMSNorm nor a LayerNorm that metalcore has"


# a stand-in, its inputs, and its output
Asked = tuple[nn.Module, tuple[Tensor, ...], Tensor]


def _agree(kind: type[Swapped], how: How, answers: list[Asked]) -> bool:
    op = "layer_norm" if kind is LayerNorm else "rms_norm"
    same = True
    for probe, inputs, theirs in answers:
        swap(probe, kind, how)
        with torch.no_grad():
            same = same and agrees(op, (theirs,), (probe.forward(*inputs),), theirs.shape[-1])
        restore(probe)
    return same


def _answers(
    module: nn.Module,
    inputs: int,
    dtypes: list[tuple[torch.dtype, torch.dtype]],
    heads: tuple[int, ...] = (),
) -> list[Asked]:
    return [_answer(module, inputs, dtype, weights, heads) for dtype, weights in dtypes]


def _answer(
    module: nn.Module,
    inputs: int,
    dtype: torch.dtype,
    weights: torch.dtype,
    heads: tuple[int, ...],
) -> Asked:
    """Random weights, an input whose rows differ in scale, and perhaps a gate."""
    drawn = {
        name: None if p is None else torch.randn(p.shape).to(weights)
        for name, p in module._parameters.items()
    }
    weight = module._parameters.get("weight")
    shape = getattr(module, "normalized_shape", None)
    width = weight.shape[-1] if weight is not None else shape[-1] if shape else _WIDTH
    probe = stand_in(module, drawn)
    # small rows tell where eps is added; three dimensions tell a LayerNorm from a GroupNorm
    scale = torch.tensor([1e-3, 1.0, 30.0])[:, None]
    x = ((torch.randn(2, 3, width) + 0.5) * scale).to(dtype)
    x = x.unflatten(2, heads) if heads else x
    gates = [3 * torch.randn(2, 3, width).to(dtype) for _ in range(inputs - 1)]
    return probe, (x, *gates), probe.forward(x, *gates)
