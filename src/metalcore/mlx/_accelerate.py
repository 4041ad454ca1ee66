# SPDX-License-Identifier: MIT
"""accelerate(): layers of an MLX model compute with metalcore, until undone.

What a layer asks `mx.fast` for is what it gets from us. Its methods run with a copy of the globals
of their module, in which `mx` is MLX with our functions in place of four of its own. So layers
that somebody else wrote are reached, and other models stay as they are.
"""

from collections import Counter
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from metalcore.mlx import _table
from metalcore.mlx._rope import rope

# Queries from which on attention is ours: for fewer, keys grow from call to call, and MLX's kernel
# for decoding knows no shapes.
_QUERIES = 8


class Summary:
    """What was replaced, and the way back."""

    def __init__(self) -> None:
        self._before: list[tuple[nn.Module, type]] = []
        self.layers: Counter[str] = Counter()

    def undo(self) -> None:
        """Let every layer compute as before."""
        for module, kind in self._before:
            module.__class__ = kind
        self._before.clear()
        self.layers.clear()

    def __str__(self) -> str:
        lines = [f"{count} x {name}" for name, count in self.layers.most_common()]
        return "metalcore computes in " + (", ".join(lines) or "no layer")


def accelerate(
    model: nn.Module,
    *,
    norms: bool = True,
    rope: bool = True,
    attention: bool = True,
    mlp: bool = True,
) -> Summary:
    """Let the layers of an MLX model compute with metalcore, in place.

    Layers of `mlx.nn`, of mlx-lm and your own are reached alike: where they call `mx.fast`, and
    the `swiglu` of mlx-lm. Parameters, checkpoints and optimizers stay as they are. The loss is
    `metalcore.mlx.default_loss`, which `mlx_lm.tuner.train` takes as `loss`.

    Args:
        model: any `mlx.nn.Module`; its parts are searched.
        norms: `mx.fast.rms_norm` and `mx.fast.layer_norm` become ours.
        rope: `mx.fast.rope` becomes ours.
        attention: `mx.fast.scaled_dot_product_attention` becomes ours, for 8 queries and more.
        mlp: `swiglu`, where a layer calls a function of that name and meaning, becomes ours.

    Returns:
        A summary to print, with `undo()`.

    Example:
        >>> print(metalcore.mlx.accelerate(model))
        metalcore computes in 9 x RMSNorm, 4 x Attention, 4 x RoPE, 4 x MLP
    """
    wanted = {"rms_norm", "layer_norm"} if norms else set()
    wanted |= {"rope"} if rope else set()
    wanted |= {"scaled_dot_product_attention"} if attention else set()
    names = frozenset(wanted | ({"swiglu"} if mlp else set()))
    summary = Summary()
    for module in model.modules():
        kind: Any = type(module)
        ours = _accelerated(kind, names)
        if ours is not None:
            summary._before.append((module, kind))
            summary.layers[kind.__name__] += 1
            module.__class__ = ours
    return summary


class _With:
    """A module with some names changed."""

    def __init__(self, module: Any, changed: dict[str, Any]) -> None:
        self._module, self._changed = module, changed

    def __getattr__(self, name: str) -> Any:
        changed = self._changed
        return changed[name] if name in changed else getattr(self._module, name)


@cache
def _accelerated(kind: type, names: frozenset[str]) -> type | None:
    """A subclass whose methods call ours; None where there is nothing to replace."""
    if getattr(kind, "_is_accelerated", False):
        return None
    methods: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base in (object, dict, nn.Module):
            continue
        for name, method in vars(base).items():
            changed = _changed(method, names) if isinstance(method, FunctionType) else None
            if changed is not None:
                methods[name] = changed
            else:
                methods.pop(name, None)
    if not methods:
        return None
    return type(kind.__name__, (kind,), {**methods, "_is_accelerated": True})


def _changed(function: FunctionType, names: frozenset[str]) -> FunctionType | None:
    """`function` among changed globals; None where it uses nothing that changes."""
    used, around = set(function.__code__.co_names), function.__globals__
    changed: dict[str, Any] = {}
    for name in used:
        value = around.get(name)
        if value is mx and "fast" in used and used & names:
            changed[name] = _With(mx, {"fast": _With(mx.fast, _ours(names))})
        elif name == "swiglu" and name in names and callable(value) and _is_swiglu(value):
            changed[name] = _table.made("swiglu")
        elif isinstance(value, FunctionType) and value is not function and name in names:
            inner = _changed(value, names)
            if inner is not None:
                changed[name] = inner
    if not changed:
        return None
    made = FunctionType(
        function.__code__, {**around, **changed}, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    made.__kwdefaults__, made.__dict__ = function.__kwdefaults__, function.__dict__
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    return made


def _is_swiglu(function: Callable[..., Any]) -> bool:
    """Whether it computes silu(gate) * up: it is asked."""
    gate, up = mx.array([-2.0, 0.5, 3.0]), mx.array([1.0, -2.0, 0.25])
    try:
        found = function(gate, up)
    except TypeError:
        return False
    return bool(mx.allclose(found, gate * mx.sigmoid(gate) * up))


@cache
def _ours(names: frozenset[str]) -> dict[str, Any]:
    ours = {
        "rms_norm": _table.made("rms_norm"),
        "layer_norm": _table.made("layer_norm"),
        "rope": rope,
        "scaled_dot_product_attention": _attention,
    }
    return {name: ours[name] for name in names if name in ours}


@cache
def _made_attention() -> Any:
    return _table.made("scaled_dot_product_attention")


def _attention(q: mx.array, k: mx.array, v: mx.array, **how: Any) -> mx.array:
    few = q.shape[-2] < _QUERIES
    attend = mx.fast.scaled_dot_product_attention if few else _made_attention()
    return attend(q, k, v, **how)
