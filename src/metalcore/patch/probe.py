# SPDX-License-Identifier: MIT
"""Probes: what a layer computes is found out by asking it, with small weights of our own."""

import warnings
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from metalcore._accuracy import error, tolerance

Answer = tuple[Tensor, ...]

# Order of up-casting shows in bfloat16 alone, mistakes in a formula in float32.
DTYPES = (torch.float32, torch.bfloat16)

# What a layer raises that was written for other inputs than those of a probe.
NO_ANSWER = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    AttributeError,
    NotImplementedError,
    AssertionError,
)


def stand_in(
    module: nn.Module,
    parameters: Mapping[str, Tensor | None] | None = None,
    modules: Mapping[str, nn.Module] | None = None,
) -> nn.Module:
    """A module of the class and with the attributes of `module`, but other parts, and no hooks."""
    made = type(module).__new__(type(module))
    nn.Module.__init__(made)
    kept = {k: v for k, v in vars(module).items() if k not in vars(made)}
    made.__dict__.update(kept)
    for name, value in (parameters or {}).items():
        made.register_parameter(name, None if value is None else nn.Parameter(value))
    for name, child in {**dict(module.named_children()), **(modules or {})}.items():
        made.add_module(name, child)
    return made


def agrees(op: str, found: Answer, ours: Answer, reduces_over: int) -> bool:
    """Whether the tensors are of equal dtypes, and as close as two results of `op` may be."""
    return len(found) == len(ours) and all(
        a.dtype == b.dtype and error(a, b) <= tolerance(op, a.dtype, reduces_over)
        for a, b in zip(found, ours, strict=True)
    )


def ask(question: Callable[[], Any]) -> Any:
    """The answer, without gradients and with numbers that do not disturb the user's; None for a
    layer that cannot answer."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        torch.device("cpu"),
        warnings.catch_warnings(),
    ):
        # of dtypes or shapes that a user of the layer would not mix
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(0)
        try:
            return question()
        except NO_ANSWER:
            return None


def likeness(module: nn.Module, but: frozenset[str] = frozenset()) -> Hashable:
    """Equal for modules that compute the same but for the values of their weights; attributes that
    `but` names may differ."""
    shapes = tuple(
        (name, None if p is None else tuple(p.shape)) for name, p in module._parameters.items()
    )
    own = (item for item in vars(module).items() if item[0] not in _OF_EVERY_MODULE | but)
    attributes = tuple((name, _likeness_of(value, but)) for name, value in own)
    parts = tuple((name, likeness(child, but)) for name, child in module.named_children())
    return type(module), shapes, attributes, parts


def _likeness_of(value: Any, but: frozenset[str]) -> Hashable:
    match value:
        case bool() | int() | float() | str() | tuple():
            return value
        case dict():
            return tuple((name, _likeness_of(item, but)) for name, item in value.items())
        case nn.Module():
            return likeness(value, but)
        case partial():
            return id(value.func), value.args, tuple(value.keywords.items())
        case _:
            return id(value)


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
