# SPDX-License-Identifier: MIT
"""Rotary embedding: the function `f(q, k, cos, sin)` that an attention layer calls, replaced.

The layer looks it up among the globals of its module. Ours stands in a copy of these, for the
layers that are accelerated; all others go on with the function of the module.
"""

import inspect
from collections.abc import Callable
from functools import partial, update_wrapper
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metalcore._check import FLOATS
from metalcore.ops.train.rope import apply_rotary_pos_emb
from metalcore.patch.probe import DTYPES, Answer, agrees, ask
from metalcore.patch.swap import Origin, Swapped

Function = Callable[..., Any]


class How(NamedTuple):
    """The variant of the function called `name`: which values are rotated together, whether it uses
    the first half of the tables for both, whether it passes on what lies past the tables, and
    whether the results have the dtype of q and k, or the wider one of q and cos. `to_halves`: of
    pairs, the results are all first values and then all second ones. `short_tables`: the tables
    are half as wide as what is rotated."""

    name: str
    interleaved: bool = False
    half_tables: bool = False
    passes_rest: bool = False
    keeps_dtype: bool = True
    to_halves: bool = False
    short_tables: bool = False


class Attention(Swapped):
    """The forward of the class, with other globals."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        origin: Origin = cls.origin
        original: Any = origin.base.forward
        how: How = origin.how
        names = dict(original.__globals__)
        names[how.name] = _replacement(names[how.name], how)
        # compilers look into the module of that name in place of these globals
        del names["__name__"]
        forward = FunctionType(
            original.__code__, names, original.__name__, original.__defaults__, original.__closure__
        )
        forward.__kwdefaults__ = original.__kwdefaults__
        cls.forward = update_wrapper(forward, original)  # type: ignore[attr-defined]


_TAKES = ["q", "k", "cos", "sin"]


def is_candidate(module: nn.Module) -> bool:
    return _name(module) is not None


def _name(module: nn.Module) -> str | None:
    """The global function of q, k, cos and sin that the forward of `module` calls."""
    forward: Any = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    for name in code.co_names if code else ():
        value = forward.__globals__.get(name)
        if callable(value) and not isinstance(value, type) and _arguments(value)[:4] == _TAKES:
            return str(name)
    return None


def _arguments(function: Any) -> list[str]:
    # the package `kernels` makes modules of functions
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        return list(inspect.signature(called).parameters)
    except (ValueError, TypeError):
        # built-in functions have none
        return []


def recognise(module: nn.Module) -> tuple[type[Swapped], How] | str:
    """The kind and variant that compute what `module` does, or why there is none."""
    name, forward = _name(module), type(module).forward
    assert name is not None
    if "forward" in vars(module) or not isinstance(forward, FunctionType):
        return "its forward was replaced already"
    if hasattr(forward, "__wrapped__"):
        return "its forward is decorated"
    how = _variant(name, forward.__globals__[name])
    return how if isinstance(how, str) else (Attention, how)


def _variant(name: str, function: Function) -> How | str:
    whole, part = (ask(partial(_answers, function, rotary)) for rotary in (8, 4))
    for how in (
        How(name),
        How(name, half_tables=True),
        How(name, interleaved=True),
        How(name, interleaved=True, half_tables=True),
        How(name, interleaved=True, half_tables=True, to_halves=True),
        How(name, short_tables=True),
        How(name, interleaved=True, short_tables=True),
    ):
        answers, tables = (part, 4) if how.short_tables else (whole, 8)
        if answers and _agree(how, answers):
            mixed = ask(partial(_mixed_dtype, function, tables))
            rest = how._replace(passes_rest=not (how.short_tables or how.to_halves))
            passes = rest.passes_rest and bool(part) and _agree(rest, part)
            return how._replace(passes_rest=passes, keeps_dtype=mixed is torch.bfloat16)
    return f"{name} computes no rotation that metalcore has"


def _mixed_dtype(function: Function, tables: int) -> Any:
    """The dtype of bfloat16 values that were rotated by tables in float32."""
    return function(*_inputs(torch.bfloat16, torch.float32, tables))[0].dtype


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
        and isinstance(unsqueeze_dim, int)
        and unsqueeze_dim in (1, 2)
    ):
        return None
    rotary = 2 * cos.shape[-1] if how.short_tables else cos.shape[-1]
    if rotary != q.shape[-1] and not (how.passes_rest and rotary < q.shape[-1]):
        return None
    if cos.shape[0] not in (1, q.shape[0]) or cos.shape[1] != q.shape[3 - unsqueeze_dim]:
        return None
    if cos.dtype is not q.dtype and not how.keeps_dtype:
        wide = torch.promote_types(q.dtype, cos.dtype)
        q, k = q.to(wide), k.to(wide)
    if how.half_tables:
        cos, sin = cos[..., : rotary // 2], sin[..., : rotary // 2]
    q, k = apply_rotary_pos_emb(
        q, k, cos, sin, None, unsqueeze_dim, interleaved=how.interleaved, rotary_dim=rotary
    )
    return (_in_halves(q), _in_halves(k)) if how.to_halves else (q, k)


def _in_halves(x: Tensor) -> Tensor:
    """The first values of all pairs of x, then the second ones."""
    return x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)


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
