# SPDX-License-Identifier: MIT
"""Launch files: a kernel, its grid and its arguments in TOML.

What is not in the tables below is refused, so that a misspelt key is not passed over.
"""

from __future__ import annotations

import difflib
import re
import sys
import tokenize
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .memory import uninitialized
from .texture import Sampler

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_NEEDED = ("kernel", "threads", "group_size")
_OPTIONS = ("checks", "order", "strict", "defines", "include", "version", "timeout")
_BY_INDEX = ("constants", "threadgroup_memory")
_KEYS = (
    *_NEEDED, *_OPTIONS, *_BY_INDEX, "arguments", "textures", "samplers", "seed", "expect"
)  # fmt: skip
_ARGUMENT = ("name", "npy", "unbound", "value", "type", "shape", "dtype", "fill", "struct")
_TEXTURE = ("index", "npy", "shape", "dtype", "fill")
_SAMPLER = ("index", "filter", "address", "coord", "border_color", "compare_func")
_FILLS = ("random", "zeros", "ones", "range", "none")
# numpy has no bfloat16: arrays of it hold the bits.
_BFLOAT = "bfloat16"
_DTYPES = (
    *("float32", "float16", _BFLOAT, "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64", "bool"),
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(slots=True)
class Spec:
    """One launch, with options for `mslsim.run`."""

    kernel: str
    threads: tuple[int, ...]
    group_size: tuple[int, ...]
    arguments: list[Any]
    names: list[str]
    options: dict[str, Any] = field(default_factory=dict)
    expect: list[dict[str, Any]] = field(default_factory=list)


def load(path: Path) -> Spec:
    """Reads a launch file; `.npy` paths in it are relative to it. Raises ValueError, in one line,
    for what it cannot mean."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return _spec(path.parent, data)
    except (ValueError, TypeError, OSError, OverflowError, MemoryError) as error:
        raise ValueError(f"{path}: {error}") from None


def _spec(folder: Path, data: dict[str, Any]) -> Spec:
    _known("key", data, _KEYS)
    missing = [name for name in _NEEDED if name not in data]
    if missing:
        raise ValueError(f"{', '.join(missing)} must be given")
    entries = data.get("arguments", [])
    generator = np.random.default_rng(data.get("seed", 0))
    options: dict[str, Any] = {name: data[name] for name in _OPTIONS if name in data}
    for name in _BY_INDEX:
        if name in data:
            options[name] = {int(k): v for k, v in data[name].items()}
    if "textures" in data:
        options["textures"] = {
            index: _argument(folder, entry, generator)
            for index, entry in _numbered("texture", data["textures"], _TEXTURE)
        }
    if "samplers" in data:
        known = _numbered("sampler", data["samplers"], _SAMPLER)
        options["samplers"] = {index: Sampler(**entry) for index, entry in known}
    return Spec(
        data["kernel"],
        _size("threads", data["threads"]),
        _size("group_size", data["group_size"]),
        [_argument(folder, entry, generator) for entry in entries],
        _names(entries),
        options,
        data.get("expect", []),
    )


def _numbered(
    what: str, entries: list[dict[str, Any]], known: Collection[str]
) -> list[tuple[int, dict[str, Any]]]:
    """Entries with the places that they name, or else those in which they stand."""
    found = []
    for i, entry in enumerate(entries):
        _known(f"key of a {what}", entry, known)
        found.append((int(entry.get("index", i)), {k: v for k, v in entry.items() if k != "index"}))
    return found


def _known(what: str, given: Collection[str], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise ValueError(f"unknown {what} {name!r}; {hint}")


def _size(name: str, value: Any) -> tuple[int, ...]:
    """A number or up to three of them, as kernels are called."""
    sizes = value if isinstance(value, list) else [value]
    if not 1 <= len(sizes) <= 3 or any(type(s) is not int for s in sizes):
        raise ValueError(f"{name} must be one to three numbers, got {value}")
    return tuple(sizes)


def _names(entries: list[dict[str, Any]]) -> list[str]:
    """What results are called: also the names of their files."""
    names = [entry.get("name", f"argument{i}") for i, entry in enumerate(entries)]
    for name in names:
        if not _NAME.fullmatch(str(name)):
            raise ValueError(f"the name of an argument must be a word, got {name!r}")
        if names.count(name) > 1:
            raise ValueError(f"two arguments are named {name}")
    return names


def _argument(folder: Path, entry: dict[str, Any], generator: np.random.Generator) -> Any:
    _known("key of an argument", entry, _ARGUMENT)
    if "npy" in entry:
        return _array(folder / entry["npy"])
    if entry.get("unbound"):
        return None
    if "struct" in entry:
        return dict(entry["struct"])
    if "value" in entry:
        if "type" not in entry:
            return entry["value"]
        return _converted(np.array(entry["value"]), entry["type"])[()]
    if "shape" not in entry:
        raise ValueError(f"an argument needs a shape, a value or an npy, got {entry}")
    dtype, fill = entry.get("dtype", "float32"), entry.get("fill", "random")
    shape = tuple(entry["shape"])
    _known("fill", [fill], _FILLS)
    if fill == "none":
        return uninitialized(_converted(np.zeros(shape), dtype))
    if fill == "range":
        values = np.arange(int(np.prod(shape))).reshape(shape)
    elif fill != "random":
        values = np.full(shape, fill == "ones")
    elif "float" in dtype:
        values = generator.standard_normal(shape)
    else:
        values = generator.integers(0, 100, shape)
    return _converted(values, dtype)


def _array(path: Path) -> Any:
    try:
        return np.load(path, allow_pickle=False)
    except (SyntaxError, EOFError, tokenize.TokenError) as error:  # of a header that is none
        raise ValueError(f"{path.name} is no array: {error}") from None


def _converted(values: Any, dtype: str) -> Any:
    _known("dtype", [dtype], _DTYPES)
    if dtype != _BFLOAT:
        return values.astype(dtype)
    bits = values.astype(np.float32).view(np.uint32)
    # to nearest, ties to even
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
