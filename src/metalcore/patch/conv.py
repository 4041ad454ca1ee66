# SPDX-License-Identifier: MIT
"""Causal convolutions of Mamba-like layers: the global functions of channels [B, D, T] that their
forward calls, over a sequence and for the next step, replaced as those of rotary embedding are."""

import inspect
from collections.abc import Callable
from functools import update_wrapper
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metalcore._check import FLOATS
from metalcore.ops.xlstm.causal_conv1d import causal_conv1d
from metalcore.patch.probe import DTYPES, agrees, ask
from metalcore.patch.swap import Origin, Swapped

Function = Callable[..., Any]
_SEQUENCE = ["hidden_states", "weight", "bias", "activation"]
_NEXT = ["hidden_states", "conv_state", "weight", "bias"]
_SILU = ("silu", "swish")


class How(NamedTuple):
    """The names of the two functions; None where the layer calls no such one."""

    over_sequence: str | None
    next_step: str | None


class CausalConv(Swapped):
    """The forward of the class, with other globals."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        origin: Origin = cls.origin
        how: How = origin.how
        original: Any = origin.base.forward
        own = inspect.unwrap(original).__globals__
        ours: dict[str, Function] = {}
        if how.over_sequence:
            ours[how.over_sequence] = _over_sequence(own[how.over_sequence])
        if how.next_step:
            ours[how.next_step] = _next_step(own[how.next_step])
        cls.forward = _with_globals(original, ours)  # type: ignore[attr-defined]


def _with_globals(function: Any, names: dict[str, Function]) -> Any:
    """A copy of `function` that sees other functions under these names, also where it is
    decorated: then the function that the decorator holds is copied."""
    inner, closure = getattr(function, "__wrapped__", None), function.__closure__ or ()
    if inner is None:
        seen = {**function.__globals__, **names}
        # compilers look into the module of that name in place of these globals
        del seen["__name__"]
    else:
        copied = _with_globals(inner, names)
        closure = tuple(CellType(copied) if c.cell_contents is inner else c for c in closure)
        seen = function.__globals__
    made = FunctionType(
        function.__code__, seen, function.__name__, function.__defaults__, closure or None
    )
    made.__kwdefaults__ = function.__kwdefaults__
    update_wrapper(made, function)
    if inner is not None:
        made.__wrapped__ = copied  # type: ignore[attr-defined]
    return made


def _fits(x: Any, weight: Any, bias: Any, activation: Any, rest: dict[str, Any]) -> bool:
    return (
        isinstance(x, Tensor)
        and x.dim() == 3
        and x.dtype in FLOATS
        and isinstance(weight, Tensor)
        and weight.dim() == 2
        and 2 <= weight.shape[1] <= 8
        and (bias is None or isinstance(bias, Tensor))
        and activation in (None, *_SILU)
        and not any(value is not None for value in rest.values())
    )


def _over_sequence(theirs: Function) -> Function:
    def conv(
        hidden_states: Any, weight: Any, bias: Any = None, activation: Any = None, **rest: Any
    ) -> Any:
        if not _fits(hidden_states, weight, bias, activation, rest):
            return theirs(hidden_states, weight, bias, activation=activation, **rest)
        act: Any = "silu" if activation else None
        return causal_conv1d(hidden_states.mT, weight, bias, activation=act).mT

    return conv


def _next_step(theirs: Function) -> Function:
    def conv(
        hidden_states: Any,
        conv_state: Any,
        weight: Any,
        bias: Any = None,
        activation: Any = None,
        **rest: Any,
    ) -> Any:
        fits = _fits(hidden_states, weight, bias, activation, rest)
        if not fits or conv_state.shape[-1] < weight.shape[1] - 1:
            return theirs(hidden_states, conv_state, weight, bias, activation=activation, **rest)
        before = conv_state[..., conv_state.shape[-1] - weight.shape[1] + 1 :]
        act: Any = "silu" if activation else None
        y = causal_conv1d(
            hidden_states.mT,
            weight,
            bias,
            activation=act,
            initial_state=before.mT.to(hidden_states.dtype),
        )
        steps = torch.cat([conv_state, hidden_states.to(conv_state.dtype)], -1)
        conv_state.copy_(steps[..., -conv_state.shape[-1] :])
        return y.mT

    return conv


def is_candidate(module: nn.Module) -> bool:
    return any(_names(module))


def _names(module: nn.Module) -> How:
    """The global functions that the forward of `module` calls, by their arguments."""
    kept = module.origin.base if isinstance(module, Swapped) else type(module)
    forward: Any = inspect.unwrap(kept.forward)
    code = getattr(forward, "__code__", None)
    found: dict[str, str] = {}
    for name in code.co_names if code else ():
        arguments = _arguments(forward.__globals__.get(name))
        for kind, wanted in (("over_sequence", _SEQUENCE), ("next_step", _NEXT)):
            if arguments[:4] == wanted:
                found[kind] = name
    return How(found.get("over_sequence"), found.get("next_step"))


def _arguments(function: Any) -> list[str]:
    if not callable(function) or isinstance(function, type):
        return []
    # the package `kernels` makes modules of functions
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        return list(inspect.signature(called).parameters)
    except (ValueError, TypeError):
        # built-in functions have none
        return []


def recognise(module: nn.Module) -> tuple[type[Swapped], How] | str:
    """The kind and variant that compute what `module` does, or why there is none."""
    if "forward" in vars(module) or not isinstance(type(module).forward, FunctionType):
        return "its forward was replaced already"
    how = _names(module)
    own = inspect.unwrap(type(module).forward).__globals__
    if how.over_sequence and not _agree(own[how.over_sequence], _over_sequence, False):
        how = how._replace(over_sequence=None)
    if how.next_step and not _agree(own[how.next_step], _next_step, True):
        how = how._replace(next_step=None)
    return (CausalConv, how) if any(how) else "computes no convolution that metalcore has"


def _agree(theirs: Function, replace: Callable[[Function], Function], has_state: bool) -> bool:
    """Whether ours gives the same results, and the same states."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError

    def answer(function: Function) -> list[Tensor]:
        torch.manual_seed(0)
        found = []
        for dtype in DTYPES:
            for kept in (3, 4):
                x, weight, bias = torch.randn(2, 6, 1), torch.randn(6, 4), torch.randn(6)
                if not has_state:
                    x = torch.randn(2, 6, 5)
                state = torch.randn(2, 6, kept).to(dtype)
                before = [state] if has_state else []
                args = [x.to(dtype), *before, weight.to(dtype), bias.to(dtype)]
                found += [function(*args, activation="silu"), *before]
        return found

    plain, ours = ask(lambda: answer(theirs)), ask(lambda: answer(replace(refuse)))
    if plain is None or ours is None:
        return False
    # theirs rounds before its activation too
    return all(
        agrees("causal_conv1d", (a,), (b,), 4)
        or (a.dtype is torch.bfloat16 and bool(((a - b).abs() <= 0.02 * a.abs().amax()).all()))
        for a, b in zip(plain, ours, strict=True)
    )
