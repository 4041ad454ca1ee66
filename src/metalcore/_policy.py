# SPDX-License-Identifier: MIT
"""The numbers of this machine, in TOML: one packaged file per machine class, then the user's.

    [silu]         from where on ours is ahead of torch: `_route.py` reads it
    [qr.cpu]       numbers of a compiled kernel, in place of those that are built in
    [qr.metal]     launch numbers of a Metal kernel
    [silu.mlx]     from where on ours is ahead of MLX's own, on the CPU

The user's file is `$METALCORE_POLICY`, else `~/.config/metalcore/policy.toml`. It has the same
tables and replaces single values; `metalcore tune` writes it.
"""

import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from metalcore import _native
from metalcore._check import expect

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Values = dict[str, Any]

PACKAGED = Path(__file__).parent / "policy"
_CLASSES = {"avx512": "x86-avx512", "avx2": "x86-avx2", "neon": "arm64-neon"}
_told: list[Callable[[], None]] = []


def machine_class() -> str:
    """The name of this CPU's file; `x86-baseline` and `none` have no file."""
    return _CLASSES.get(_native.isa or "", "x86-baseline" if _native.isa else "none")


def packaged_file() -> Path:
    return PACKAGED / f"{machine_class()}.toml"


def user_file() -> Path:
    """Where the user's numbers are; below `~` where nobody knows a home folder."""
    default = os.path.expanduser("~/.config/metalcore/policy.toml")
    return Path(os.environ.get("METALCORE_POLICY", default))


def tables(name: str) -> list[tuple[Path, Values]]:
    """The table `name`, such as "qr.cpu", of each file that has it; the last file wins."""
    found = []
    for file in (PACKAGED / "metal.toml", PACKAGED / "mlx.toml", packaged_file(), user_file()):
        table: Any = _read(file)
        for part in name.split("."):
            table = table.get(part, {})
        if table:
            found.append((file, table))
    return found


@cache
def policy(op: str, backend: str, **built_in: Any) -> Values:
    """The numbers of `op` on `backend` (`cpu`, `metal` or `mlx`). `built_in` are those of an op
    that keeps its own values in Python."""
    values = dict(built_in or (_knobs().get(op, {}) if backend == "cpu" else {}))
    for file, table in tables(f"{op}.{backend}"):
        if backend == "metal" and file.parent == PACKAGED:
            values |= table
            continue
        where = f"{file} [{op}.{backend}]"
        for key, value in table.items():
            expect(key in values, op, f"{where} sets {key}, which is none of {', '.join(values)}")
            kind = type(values[key])
            expect(
                type(value) is kind,
                op,
                f"{where} {key} must be of type {kind.__name__}, got {value!r}",
            )
            values[key] = value
    return values


def tune_cpu_kernels() -> None:
    """Give the compiled kernels the numbers of this machine."""
    for op in _knobs():
        for name, value in policy(op, "cpu").items():
            _native.set_knob(op, name, value)


def when_changed(forget: Callable[[], None]) -> Callable[[], None]:
    """`forget` is called when numbers change: it drops what was made of them."""
    _told.append(forget)
    return forget


def tell() -> None:
    """Tell those who asked for it that numbers are others now."""
    for forget in _told:
        forget()


def changed() -> None:
    """Read all files again; to be called when one was written."""
    _read.cache_clear()
    policy.cache_clear()
    tune_cpu_kernels()
    tell()


@cache
def _knobs() -> dict[str, Values]:
    """What is built into the compiled kernels; asked before anything is set."""
    return _native.knobs()


@cache
def _read(path: Path) -> dict[str, Values]:
    # pathlib's would raise for a home folder of somebody else
    if not os.path.exists(path):
        return {}
    try:
        found: dict[str, Values] = tomllib.loads(path.read_text())
        return found
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"metalcore: {path}: {error}") from None
