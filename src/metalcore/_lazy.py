# SPDX-License-Identifier: MIT
"""Packages that load what is asked of them, when it is asked.

The stub of a package (`__init__.pyi`) is the table of its names: type checkers read it, and so does
`attach`. A line `from metalcore.ops.linalg.qr import qr as qr` is a name and where it is from,
and `fused_softmax = softmax` another name of the same.
"""

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch

from metalcore import _torch

T = TypeVar("T")

FAMILIES = ("attn", "decode", "linalg", "precise", "quant", "train", "xlstm")
"""The public packages of ops."""


def attach(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package, by its stub."""
    module = sys.modules[package]
    names = table(package)

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        origin, own = names[name]
        if origin == package:
            return import_module(f"{origin}.{own}")
        found = getattr(import_module(origin), own)
        setattr(module, name, found)
        return found

    def __dir__() -> list[str]:  # noqa: N807
        return sorted({*vars(module), *names})

    return __getattr__, __dir__, sorted(names)


@cache
def table(package: str) -> dict[str, tuple[str, str]]:
    """Of each name in the stub of `package`: the module that has it, and its name there."""
    found: dict[str, tuple[str, str]] = {}
    stub = Path(str(sys.modules["metalcore"].__file__)).parent
    stub = stub.joinpath(*package.split(".")[1:], "__init__.pyi")
    for node in ast.parse(stub.read_text()).body:
        match node:
            case ast.ImportFrom(str(module), [ast.alias("*")]):
                found |= {name: (module, name) for name in table(module)}
            case ast.ImportFrom(str(module), names):
                found |= {name.name: (module, name.name) for name in names}
            case ast.Assign([ast.Name(alias)], ast.Name(name)):
                found[alias] = found[name]
            case ast.Assign([ast.Name(alias)], ast.Attribute(ast.Name(module), name)):
                found[alias] = (f"{package}.{module}", name)
    return found


@cache
def load_families() -> None:
    """Load every op there is."""
    for family in FAMILIES:
        for module, _ in table(f"metalcore.{family}").values():
            import_module(module)


def define(library: torch.library.Library, schema: str, **options: Any) -> Any:
    """Define an op; what torch calls its default overload."""
    with _torch.defining():
        library.define(schema, **options)
        return getattr(getattr(torch.ops, library.ns), schema.split("(", 1)[0]).default


class Registry(Mapping[str, T]):
    """What modules of ops register when they load. To ask for something that is not there, or for
    all there is, loads every family."""

    def __init__(self) -> None:
        self._loaded: dict[str, T] = {}

    def add(self, name: str, value: T) -> None:
        self._loaded[name] = value

    def __getitem__(self, name: str) -> T:
        if name not in self._loaded:
            load_families()
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        load_families()
        return iter(self._loaded)

    def __len__(self) -> int:
        load_families()
        return len(self._loaded)
