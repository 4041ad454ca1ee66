# SPDX-License-Identifier: MIT
"""Functions of torch replaced by name, for all threads or for one block, and put back as they were.

A replacement stands where torch looks the function up (`torch.softmax`, not `F.softmax`), looks at
its arguments, and calls what it found there for all that it does not take.
"""

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metalcore import _torch
from metalcore._route import Route
from metalcore._simulate import simulate
from metalcore._trace import trace

Function = Callable[..., Any]

PLAIN = frozenset((Tensor, torch.nn.Parameter))
"""The classes of tensors that are taken: subclasses have their own idea of a function."""

ABSENT: Any = object()
"""Stands for an argument that was not given."""

# Compilers take this for a constant and see the call of torch's own function.
compiling = torch.compiler.is_dynamo_compiling

_DEVICES = frozenset(("cpu", "mps"))
# gone from torch 2.13 on
_has_names: Function | None = getattr(Tensor, "has_names", None)


class _Block:
    """The groups that a `with` statement holds, until it is left: by whichever thread."""

    def __init__(self, groups: Collection[str]) -> None:
        self.groups = frozenset(groups)


_NONE: frozenset[str] = frozenset()
# The blocks around the caller; None while one of our functions computes, which may itself call
# torch.
_held: ContextVar[tuple[_Block, ...] | None] = ContextVar("metalcore.patch", default=())


class _Everywhere(NamedTuple):
    """Who holds which groups for all threads."""

    holders: dict[str, frozenset[str]]
    groups: frozenset[str]


_everywhere = _Everywhere({}, frozenset())
_blocks: dict[str, int] = {}
_lock = threading.RLock()
_kept: list[Function] = []


class Place:
    """An attribute where torch looks a function up, and what takes its place."""

    def __init__(self, group: str, owner: Any, name: str, make: Callable[[Any], Function]) -> None:
        self.group, self._owner, self._attribute, self._make = group, owner, name, make
        self._own = True
        self._original: Any = None
        self._replacement: Any = None
        self._installed = False

    def __str__(self) -> str:
        module = getattr(self._owner, "__module__", None)
        prefix = f"{module}." if module else ""
        return f"{prefix}{self._owner.__name__}.{self._attribute}"

    def pair(self) -> tuple[Function, Function]:
        """What is replaced, and what takes its place."""
        current = getattr(self._owner, self._attribute)
        if not self._installed and current is not self._original:
            self._original, self._replacement = current, self._dressed(current)
        return self._original, self._replacement

    def install(self) -> None:
        # Where it is installed already, somebody may have put torch's function back.
        if self._installed and getattr(self._owner, self._attribute) is not self._original:
            return
        replacement = self.pair()[1]
        # a method that a class inherits is not its own
        self._own = self._attribute in vars(self._owner)
        setattr(self._owner, self._attribute, replacement)
        self._installed = True

    def restore(self) -> None:
        # What somebody else put over ours stays: ours passes everything on by now.
        if not self._installed or getattr(self._owner, self._attribute) is not self._replacement:
            return
        if self._own:
            setattr(self._owner, self._attribute, self._original)
        else:
            delattr(self._owner, self._attribute)
        self._installed = False
        _torch.forget(self._replacement, self._original)

    def _dressed(self, original: Any) -> Function:
        """The replacement, with the name by which pickle, TorchScript and inspect know torch's."""
        made = self._make(original)
        made.__module__, _, made.__qualname__ = str(self).rpartition(".")
        if isinstance(self._owner, type):
            made.__module__ = self._owner.__module__
            made.__qualname__ = f"{self._owner.__qualname__}.{self._attribute}"
        made.__name__, made.__doc__ = self._attribute, original.__doc__
        made.__wrapped__ = original  # type: ignore[attr-defined]
        made.__prepare_scriptable__ = lambda: original  # type: ignore[attr-defined]
        if _torch.pass_for(made, original):
            _kept.append(made)
        return made


PLACES: dict[str, list[Place]] = {}
"""The places of each group."""


def replaces(group: str, *places: tuple[Any, str]) -> Callable[[Function], Function]:
    """Attach `make(original) -> replacement` to places of a group."""

    def attach(make: Function) -> Function:
        for owner, name in places:
            # what torch has no longer is not replaced
            if hasattr(owner, name):
                PLACES.setdefault(group, []).append(Place(group, owner, name, make))
        return make

    return attach


def is_ours(group: str, route: Route, x: Any, *others: Tensor | None, least: int = 0) -> bool:
    """Whether a call with x, of at least that many values, is taken: ours is ahead for it, and
    `may_replace` holds."""
    return (
        type(x) in PLAIN
        and not compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        and x.dim() >= route.least_rank
        and not route.is_behind(x, least=least)
        and x.dtype in route.dtypes
        and may_replace(group, x, *others)
    )


def may_replace(group: str, x: Tensor, *others: Tensor | None) -> bool:
    """Whether the caller sees the group replaced, and these are plain tensors of one device and
    dtype that nothing but autograd and our own modes watches."""
    held = _held.get()
    if held is None:
        return False
    if group not in _everywhere.groups and not any(group in block.groups for block in held):
        return False
    if _torch.is_transformed() or _torch.has_dual_level() or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        return False
    if _torch.has_function_mode() and not all(
        map(_torch.sets_device_only, _torch.function_modes())
    ):
        return False
    if _torch.has_dispatch_mode() and not all(
        isinstance(mode, (trace, simulate)) for mode in _torch.dispatch_modes()
    ):
        return False
    device, dtype = x.device, x.dtype
    if device.type not in _DEVICES or not dtype.is_floating_point:
        return False
    if device.type != "cpu" and torch.is_autocast_enabled(device.type):
        return False
    return _is_plain(x) and all(t is None or goes_with(x, t) for t in others)


def goes_with(x: Tensor, other: Any) -> bool:
    """Whether `other` is a plain tensor of the device and dtype of x."""
    return _is_plain(other) and other.dtype is x.dtype and other.device == x.device


def _is_plain(x: Any) -> bool:
    return (
        type(x) in PLAIN
        and x.layout is torch.strided
        and not x.is_nested
        and not (_has_names is not None and _has_names(x))
    )


def records(x: Tensor) -> bool:
    """Whether autograd will want the gradient of x."""
    return x.requires_grad and torch.is_grad_enabled()


def compute(function: Function, *args: Any, **named: Any) -> Any:
    """Call one of our functions; what it asks of torch is torch's own."""
    token = _held.set(None)
    try:
        return function(*args, **named)
    finally:
        _held.reset(token)


def as_if_held(group: str, replacement: Function, *args: Any, **named: Any) -> Any:
    """Call a replacement as one who sees the group replaced, wherever it is installed."""
    token = _held.set((_Block((group,)),))
    try:
        return replacement(*args, **named)
    finally:
        _held.reset(token)


def compute_or_explain(function: Function, original: Function, *args: Any) -> Any:
    """Call one of our functions. Where it refuses an argument, torch says so in its own words."""
    try:
        return compute(function, *args)
    except (IndexError, ValueError, RuntimeError):
        original(*args)
        raise


def hold(holder: str, groups: Collection[str]) -> None:
    """Replace groups for all threads, in addition to what `holder` holds."""
    _refuse_in_block(holder)
    with _lock:
        _set_holders({**_everywhere.holders, holder: held_everywhere(holder).union(groups)})


def release(holder: str, groups: Collection[str]) -> None:
    """Give up groups that `holder` holds for all threads."""
    _refuse_in_block(holder)
    with _lock:
        _set_holders({**_everywhere.holders, holder: held_everywhere(holder).difference(groups)})


def held_everywhere(holder: str) -> frozenset[str]:
    return _everywhere.holders.get(holder, frozenset())


def held_by_blocks() -> frozenset[str]:
    """What the blocks around the caller hold."""
    return _NONE.union(*(block.groups for block in _held.get() or ()))


@contextmanager
def block(groups: Collection[str]) -> Iterator[None]:
    """Replace groups for the caller's thread (and task) alone."""
    held, around = _Block(groups), _held.get()
    _count(held.groups, 1)
    _held.set((*(around or ()), held))
    try:
        yield
    finally:
        _count(held.groups, -1)
        # a generator may be closed by another thread, for which this block never was
        seen = _held.get() or ()
        if held in seen:
            _held.set(None if around is None else tuple(b for b in seen if b is not held))
        held.groups = _NONE


def _count(groups: frozenset[str], by: int) -> None:
    with _lock:
        for group in groups:
            _blocks[group] = _blocks.get(group, 0) + by
        _update()


def _set_holders(holders: dict[str, frozenset[str]]) -> None:
    global _everywhere
    _everywhere = _Everywhere(holders, frozenset[str]().union(*holders.values()))
    _update()


def _update() -> None:
    for group, places in PLACES.items():
        wanted = group in _everywhere.groups or _blocks.get(group, 0) > 0
        for place in places:
            (place.install if wanted else place.restore)()


def _refuse_in_block(holder: str) -> None:
    if held_by_blocks():
        raise RuntimeError(
            f"{holder}: cannot be changed for all threads inside `with metalcore.overrides(...)`, "
            f"which holds {', '.join(sorted(held_by_blocks()))} here; leave the block first"
        )
