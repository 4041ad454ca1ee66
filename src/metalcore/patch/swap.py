# SPDX-License-Identifier: MIT
"""A module computes with metalcore when its class is exchanged for a subclass of it.

The subclass has the name of the class, its own `forward`, and nothing else. So weights, hooks,
`state_dict` and `isinstance` stay, copies and pickles keep the new class, and undoing is one
assignment.
"""

from functools import cache
from typing import Any, ClassVar, NamedTuple

from torch import nn


class Origin(NamedTuple):
    """What a subclass was made of: `kind` computes for `base`, `how` says in which variant."""

    base: type[nn.Module]
    kind: "type[Swapped]"
    how: Any


class Swapped:
    """Base of the kinds of layers: a kind has the `forward` that takes the place of the class's."""

    origin: ClassVar[Origin]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # the subclass has no name that pickle could find it by
        reduced = super().__reduce_ex__(max(2, protocol))
        assert isinstance(reduced, tuple)
        return _new, (self.origin,), *reduced[2:]


@cache
def _subclass(origin: Origin) -> type[nn.Module]:
    base, kind, _ = origin
    names = {
        "origin": origin,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    return type(base.__name__, (kind, base), names)


def _new(origin: Origin) -> nn.Module:
    made = _subclass(origin)
    return made.__new__(made)


# in a module: who swapped it; a copy of the module has it too
_BY = "_swapped_by"


def swap(module: nn.Module, kind: type[Swapped], how: Any, by: str = "") -> None:
    """Let `kind` compute what `module` computes; `how` has to be hashable and picklable."""
    module.__class__ = _subclass(Origin(type(module), kind, how))
    vars(module)[_BY] = by


def swapped_by(module: nn.Module) -> str | None:
    """What `by` was when `module`, or what it is a copy of, was swapped."""
    by: str | None = vars(module).get(_BY)
    return by


def restore(module: nn.Module) -> None:
    """Give `module` its own class again."""
    if isinstance(module, Swapped):
        object.__setattr__(module, "__class__", module.origin.base)
        vars(module).pop(_BY, None)
