# SPDX-License-Identifier: MIT
"""Rotary embedding: the function `f(q, k, cos, sin)` of a modeling module, replaced by ours.

Attention looks the function up among the globals of its module, so the replacement counts for all
models of that module. It stands as long as an attention layer holds it.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from metalcore._check import FLOATS
from metalcore.ops.train.rope import apply_rotary_pos_emb
from metalcore.patch.probe import DTYPES, Answer, agrees, ask

Function = Callable[..., Any]


class How(NamedTuple):
    """The variant of a function: which values are rotated together, whether it uses the first
    half of the tables for both, whether it passes on what lies past the tables, and whether the
    results have the dtype of q and k, or the wider one of q and cos."""

    interleaved: bool
    half_tables: bool
    passes_rest: bool
    keeps_dtype: bool


class Place(NamedTuple):
    """A global name of a module."""

    module: dict[str, Any]
    name: str

    @property
    def label(self) -> str:
        return f"{self.module['__name__']}.{self.name}"


class _Held:
    """A replaced function and the attention layers that hold the replacement."""

    def __init__(self, place: Place, how: How) -> None:
        self.how, self.original = how, place.module[place.name]
        self.ours = _replacement(self.original, how)
        self.users: WeakSet[nn.Module] = WeakSet()


_held: dict[str, _Held] = {}


def places(module: nn.Module) -> Iterator[Place]:
    """The global functions of q, k, cos and sin that the forward of `module` calls."""
    forward: Any = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    for name in code.co_names if code else ():
        value = forward.__globals__.get(name)
        if callable(value) and not isinstance(value, type) and _arguments(value)[:4] == _TAKES:
            yield Place(forward.__globals__, name)


_TAKES = ["q", "k", "cos", "sin"]


def _arguments(function: Any) -> list[str]:
    # the package `kernels` makes modules of functions
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        return list(inspect.signature(called).parameters)
    except (ValueError, TypeError):
        # built-in functions have none
        return []


def recognise(place: Place) -> How | str:
    """The variant that computes what the function does, or why there is none."""
    function = place.module[place.name]
    if place.label in _held and function is _held[place.label].ours:
        return _held[place.label].how
    whole, part = (ask(partial(_answers, function, rotary)) for rotary in (8, 4))
    for interleaved in (False, True):
        for half_tables in (False, True):
            how = How(interleaved, half_tables, True, True)
            if whole and _agree(how, whole):
                passes = bool(part) and _agree(how, part)
                mixed = ask(lambda: function(*_inputs(torch.bfloat16, torch.float32, 8))[0].dtype)
                return How(interleaved, half_tables, passes, mixed is torch.bfloat16)
    return "computes no rotation that metalcore has"


def _inputs(dtype: torch.dtype, tables: torch.dtype, rotary: int) -> tuple[Tensor, ...]:
    q, k = torch.randn(2, 3, 5, 8).to(dtype), torch.randn(2, 1, 5, 8).to(dtype)
    # any numbers will do for cos and sin, and tell which of them are used where
    return q, k, *(torch.randn(2, 5, rotary).to(tables) for _ in range(2))


def _answers(function: Function, rotary: int) -> list[tuple[int, tuple[Tensor, ...], Answer]]:
    """Where the heads are, inputs, and outputs of the function, for each case to compare."""
    answers: list[tuple[int, tuple[Tensor, ...], Answer]] = []
    for dtype in DTYPES:
        q, k, cos, sin = _inputs(dtype, dtype, rotary)
        for heads, inputs in (
            (1, (q, k, cos, sin)),
            (2, (q.transpose(1, 2), k.transpose(1, 2), cos, sin)),
        ):
            answers.append((heads, inputs, tuple(function(*inputs, unsqueeze_dim=heads))))
    return answers


def _agree(how: How, answers: list[tuple[int, tuple[Tensor, ...], Answer]]) -> bool:
    for heads, inputs, theirs in answers:
        ours = _rotate(how, heads, *inputs)
        if ours is None or not agrees("rope", theirs, ours, 2):
            return False
    return True


def _rotate(how: How, unsqueeze_dim: Any, q: Any, k: Any, cos: Any, sin: Any) -> Answer | None:
    """q and k, rotated, or None for arguments that are left to the original function."""
    if not (
        isinstance(q, Tensor)
        and isinstance(cos, Tensor)
        and q.dim() == 4
        and q.dtype in FLOATS
        and q.dtype is k.dtype
        and cos.dim() == 3
        and cos.dtype in FLOATS
        and unsqueeze_dim in (1, 2)
    ):
        return None
    rotary = cos.shape[-1]
    if rotary != q.shape[-1] and not (how.passes_rest and rotary < q.shape[-1]):
        return None
    if cos.shape[0] not in (1, q.shape[0]) or cos.shape[1] != q.shape[3 - unsqueeze_dim]:
        return None
    if cos.dtype is not q.dtype and not how.keeps_dtype:
        wide = torch.promote_types(q.dtype, cos.dtype)
        q, k = q.to(wide), k.to(wide)
    if how.half_tables:
        cos, sin = cos[..., : rotary // 2], sin[..., : rotary // 2]
    return apply_rotary_pos_emb(
        q, k, cos, sin, None, unsqueeze_dim, interleaved=how.interleaved, rotary_dim=rotary
    )


def _replacement(original: Function, how: How) -> Function:
    def rotated(
        q: Any, k: Any, cos: Any, sin: Any, *args: Any, unsqueeze_dim: int = 1, **kwargs: Any
    ) -> Any:
        if not kwargs and len(args) < 2:
            found = _rotate(how, args[0] if args else unsqueeze_dim, q, k, cos, sin)
            if found is not None:
                return found
        if args:
            return original(q, k, cos, sin, *args, **kwargs)
        return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, **kwargs)

    return rotated


def hold(place: Place, how: How, layers: list[nn.Module]) -> list[nn.Module]:
    """Replace the function, or go on doing so, for `layers`; those that did not hold it yet."""
    entry = _held.get(place.label)
    if entry is None or place.module[place.name] is not entry.ours:
        entry = _held[place.label] = _Held(place, how)
        place.module[place.name] = entry.ours
    added = [layer for layer in layers if layer not in entry.users]
    entry.users.update(added)
    return added


def release(place: Place, layers: list[nn.Module]) -> None:
    """Give the function back to its module when no other layer holds the replacement."""
    entry = _held.get(place.label)
    if entry is None:
        return
    entry.users.difference_update(layers)
    if not entry.users:
        del _held[place.label]
        # somebody may have put another function there since
        if place.module[place.name] is entry.ours:
            place.module[place.name] = entry.original
