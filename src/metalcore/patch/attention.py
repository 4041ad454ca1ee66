# SPDX-License-Identifier: MIT
"""Attention of a transformers model: its layers look a function up by a name in their config.

The name is set in the configs of the model, and nothing else; `undo` sets the one that was there.
"""

import inspect
import sys
from collections.abc import Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metalcore._accuracy import error, tolerance
from metalcore.patch.probe import ask, stand_in

NAME = "metalcore"
"""The name of our function in transformers."""

_ALREADY = "it is accelerated already"
# what the attention of a modeling file may take that ours takes too
_KNOWN = {
    *("module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal"),
    *("sliding_window", "softcap", "s_aux", "position_bias", "kwargs"),
}


class Layers(NamedTuple):
    """Layers of one class that look their attention up in one config."""

    model: Any
    modules: list[nn.Module]


def find(model: nn.Module) -> Iterator[Layers]:
    """The layers of a model by class and config, each with the model that has the config."""
    if sys.modules.get("transformers") is None:
        return
    from transformers import PreTrainedModel

    owners: dict[int, Any] = {}
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            owners.setdefault(id(part.config), part)
    found: dict[tuple[int, type], list[nn.Module]] = {}
    for module in model.modules():
        key = id(getattr(module, "config", None))
        if key in owners and _eager(module) is not None:
            found.setdefault((key, type(module)), []).append(module)
    for (key, _), modules in found.items():
        yield Layers(owners[key], modules)


def _eager(module: nn.Module) -> Any:
    """The function that computes for a layer where its config names none."""
    forward: Any = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    if code is None or "ALL_ATTENTION_FUNCTIONS" not in code.co_names:
        return None
    names = [n for n in code.co_names if n.startswith("eager_") and n in forward.__globals__]
    return forward.__globals__[names[0]] if names else None


def why_not(layers: Layers) -> str:
    """Why layers are left alone; nothing if ours may compute them."""
    name = layers.model.config._attn_implementation
    if name == NAME:
        return _ALREADY
    if getattr(layers.model.config, "output_attentions", False):
        return "its config wants the weights of attention"
    if name == "sdpa":
        return ""
    if name != "eager":
        return f"its config asks for {name!r}"
    return "" if _computes_ours(layers.modules[0]) else "its attention computes something else"


def _computes_ours(module: nn.Module) -> bool:
    """Whether the attention of a modeling file gives our result."""
    eager = _eager(module)
    takes = set(inspect.signature(eager).parameters)
    if not takes <= _KNOWN:
        return False
    caps = (None, 5.0) if "softcap" in takes else (None,)
    return all(ask(partial(_agrees, module, eager, cap)) is True for cap in caps)


def _agrees(module: nn.Module, eager: Any, softcap: float | None) -> bool:
    from metalcore.patch.attention_function import attend

    own = {n: None if p is None else torch.randn(p.shape) for n, p in module._parameters.items()}
    layer = stand_in(module, own).eval()
    group = getattr(module, "num_key_value_groups", 1)
    sinks: Tensor | None = getattr(layer, "sinks", None)
    heads = 2 * group if sinks is None else sinks.numel()
    size = getattr(module, "head_dim", 8)
    q, k = torch.randn(2, heads, 5, size), torch.randn(2, heads // group, 7, size)
    mask = torch.rand(2, 1, 5, 7) < 0.7
    mask[..., 0] = True
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(q.dtype).min)
    options: dict[str, Any] = {"scaling": 0.3, "softcap": softcap}
    takes = inspect.signature(eager).parameters
    theirs = eager(layer, q, k, k, added, **{n: v for n, v in options.items() if n in takes})[0]
    ours = attend(layer, q, k, k, mask, s_aux=sinks, **options)[0]
    return error(theirs, ours) <= tolerance("attention", q.dtype, size + 7)


def use(layers: Layers) -> str:
    """Let ours compute the layers; the name of what did so before."""
    _register()
    before: str = layers.model.config._attn_implementation
    layers.model.set_attn_implementation({"": NAME})
    return before


def restore(layers: Layers, name: str) -> None:
    """Let that of `name` compute the layers again, unless somebody has set another since."""
    if layers.model.config._attn_implementation == NAME:
        layers.model.set_attn_implementation({"": name})


@cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    from metalcore.patch.attention_function import attend
    from metalcore.patch.attention_masks import make_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)
