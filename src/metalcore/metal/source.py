# SPDX-License-Identifier: MIT
"""Metal sources: read with our headers inlined, compiled once per process, and their signatures."""

import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mslsim.signature import Signature, read_signatures

_HERE = Path(__file__).parent

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


@cache
def signatures(file: str) -> dict[str, Signature]:
    """What the kernels of `file` declare, by the names of their functions."""
    found = read_signatures(read(file))
    for function, declared in found.items():
        for number, parameter in enumerate(declared.parameters):
            if parameter.index != number:
                raise ValueError(
                    f"{file}: {function} must number its buffers from 0 without a gap, "
                    f"got {parameter.index} for {parameter.name}"
                )
    return found


def signature(file: str, function: str) -> Signature:
    """The signature of kernel `function` in `file`."""
    found = signatures(file)
    if function not in found:
        raise ValueError(f"{file}: there is no kernel named {function}")
    return found[function]
