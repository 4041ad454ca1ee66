# SPDX-License-Identifier: MIT
"""Metal sources: read with our headers inlined, compiled once per process, and their signatures."""

import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

_HERE = Path(__file__).parent
_TYPE_BYTES = {"float": 4, "int": 4, "uint": 4, "half": 2, "bfloat": 2, "float4": 16, "long": 8}

Compiler = Callable[[str], Any]


@cache
def read(file: str) -> str:
    """The text of `file` (`<family>/<op>.metal`) with `#include "..."` replaced by our headers.

    Line markers keep compiler messages pointing at the files as they are in the repository.
    """
    seen: set[str] = set()

    def expand(path: Path) -> str:
        lines = [f'#line 1 "{path.name}"']
        for number, line in enumerate(path.read_text().splitlines(), 1):
            include = re.match(r'\s*#include\s+"([^"]+)"', line)
            if include is None:
                lines.append("" if line.strip() == "#pragma once" else line)
                continue
            if include[1] not in seen:
                seen.add(include[1])
                lines.append(expand(_HERE / "include" / include[1]))
            lines.append(f'#line {number + 1} "{path.name}"')
        return "\n".join(lines)

    return expand(_HERE / file) + "\n"


def files() -> list[str]:
    """All sources, as `<family>/<op>.metal`."""
    return sorted(str(path.relative_to(_HERE)) for path in _HERE.glob("*/*.metal"))


@cache
def library(file: str, compiler: Compiler | None = None) -> Any:
    """The compiled library that holds the kernels of `file`.

    On a GPU this is the metallib that was built with the package, where there is one and torch
    can load it, else the source compiled by torch. `compiler` replaces both.
    """
    if compiler is not None:
        return compiler(read(file))
    built = metallib()
    if built is not None and hasattr(torch.mps, "load_metallib"):
        return _load(built)
    return torch.mps.compile_shader(read(file))


@cache
def _load(path: Path) -> Any:
    return torch.mps.load_metallib(path.read_bytes())


def metallib() -> Path | None:
    """The library of all kernels that a build on a Mac puts into the package."""
    folders = sys.modules[__name__.partition(".")[0]].__path__
    files = [Path(folder) / "metal" / "metalcore.metallib" for folder in folders]
    return next((file for file in files if file.exists()), None)


class Parameter(NamedTuple):
    """One buffer argument of a kernel: `device const float* x` or `constant long& n`."""

    name: str
    type: str
    is_scalar: bool


class Signature(NamedTuple):
    """What a kernel function declares, read from its text."""

    parameters: tuple[Parameter, ...]
    threadgroup_bytes: int
    has_collectives: bool


@cache
def signature(file: str, function: str) -> Signature:
    """The signature of kernel `function` in `file`."""
    text = re.sub(r"//[^\n]*", "", read(file))
    head = re.search(rf"\bkernel\s+void\s+{function}\s*\(", text)
    if head is None:
        raise ValueError(f"{file}: there is no kernel named {function}")
    parameter_text, body_start = _matching(text, head.end() - 1, "()")
    body, _ = _matching(text, text.index("{", body_start), "{}")
    parameters: list[Parameter] = []
    for declaration in re.split(r",\s*(?![^<]*>)", parameter_text):
        found = re.search(
            r"(?:device|constant)\s+(?:const\s+)?(.+?)\s*([*&])\s*(\w+)\s*\[\[buffer\((\d+)\)\]\]",
            declaration,
        )
        if found is not None:
            if int(found[4]) != len(parameters):
                raise ValueError(f"{file}: {function} must number its buffers in order: {found[3]}")
            parameters.append(Parameter(found[3], found[1], found[2] == "&"))
    return Signature(
        tuple(parameters),
        _threadgroup_bytes(file, body),
        re.search(r"\b(simd_|quad_|threadgroup_)\w+\s*\(", body) is not None,
    )


def _threadgroup_bytes(file: str, body: str) -> int:
    total = 0
    for kind, name, size in re.findall(r"\bthreadgroup\s+(\w+)\s+(\w+)\s*\[([^\]]+)\]", body):
        if kind not in _TYPE_BYTES or not size.strip().isdigit():
            raise ValueError(
                f"{file}: threadgroup array {name} must have a plain type and a literal size, "
                f"got {kind} [{size}]"
            )
        total += _TYPE_BYTES[kind] * int(size)
    return total


def _matching(text: str, start: int, pair: str) -> tuple[str, int]:
    """The text between the bracket at `start` and its counterpart, and where that ends."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == pair[0]) - (text[i] == pair[1])
        if depth == 0:
            return text[start + 1 : i], i + 1
    raise ValueError(f"unbalanced {pair} after: {text[start : start + 60]}")
