# SPDX-License-Identifier: MIT
"""Launch files: a kernel, its grid and its arguments in TOML."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .memory import uninitialized

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FILLS = ("random", "zeros", "ones", "range", "none")


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
    """Reads a launch file; `.npy` paths in it are relative to it."""
    data = tomllib.loads(path.read_text())
    missing = {"kernel", "threads", "group_size"} - set(data)
    if missing:
        raise ValueError(f"{path}: {', '.join(sorted(missing))} must be given")
    entries = data.get("arguments", [])
    generator = np.random.default_rng(data.get("seed", 0))
    options: dict[str, Any] = {
        name: data[name]
        for name in ("checks", "order", "strict", "defines", "include", "version", "timeout")
        if name in data
    }
    for name in ("constants", "threadgroup_memory"):
        if name in data:
            options[name] = {int(k): v for k, v in data[name].items()}
    return Spec(
        data["kernel"],
        tuple(data["threads"]),
        tuple(data["group_size"]),
        [_argument(path, entry, generator) for entry in entries],
        [entry.get("name", f"argument{i}") for i, entry in enumerate(entries)],
        options,
        data.get("expect", []),
    )


def _argument(path: Path, entry: dict[str, Any], generator: np.random.Generator) -> Any:
    if "npy" in entry:
        return np.load(path.parent / entry["npy"])
    if entry.get("unbound"):
        return None
    if "value" in entry:
        if "type" not in entry:
            return entry["value"]
        return np.dtype(entry["type"]).type(entry["value"])
    if "shape" not in entry:
        raise ValueError(f"{path}: an argument needs a shape, a value or an npy, got {entry}")
    dtype, fill = np.dtype(entry.get("dtype", "float32")), entry.get("fill", "random")
    shape = tuple(entry["shape"])
    if fill == "random":
        if dtype.kind == "f":
            return generator.standard_normal(shape).astype(dtype)
        return generator.integers(0, 100, shape).astype(dtype)
    if fill == "range":
        return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    if fill == "none":
        return uninitialized(np.zeros(shape, dtype))
    if fill in ("zeros", "ones"):
        return np.full(shape, fill == "ones", dtype)
    raise ValueError(f"{path}: fill must be one of {_FILLS}, got {fill!r}")
