# SPDX-License-Identifier: MIT
"""Metal sources: read with our headers inlined, compiled once per process, and their signatures."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from metalcore.metal.text.signature import Signature, read_signatures, without_kernels

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
    return (compiler or torch.mps.compile_shader)(read(file))


Variant = tuple[str | int, ...]
"""Template arguments: types by their Metal names, numbers, and flags as bools."""


@cache
def kernel(file: str, function: str, variant: Variant, compiler: Compiler | None = None) -> Any:
    """Kernel `function` of `file`, compiled for these template arguments: by torch for the GPU, or
    by `compiler`."""
    library = (compiler or torch.mps.compile_shader)(kernel_text(file, function, variant))
    return getattr(library, kernel_name(file, function, variant))


def kernel_text(file: str, function: str, variant: Variant) -> str:
    """What makes one kernel: `file` less its other kernels, and the instance of a template."""
    others = {name: s for name, s in signatures(file).items() if name != function}
    return without_kernels(read(file), others) + instantiation(file, function, variant)


def kernel_name(file: str, function: str, variant: Variant) -> str:
    """`rms_norm_float_4_weight` for T = float, WIDTH = 4, WEIGHT = true: a flag by its name."""
    parts = [function]
    for parameter, value in zip(signature(file, function).template, variant, strict=True):
        if parameter.type == "bool":
            parts += [parameter.name.lower()] if value else []
        else:
            parts.append(str(value))
    return "_".join(parts)


def arguments(variant: Variant) -> list[str]:
    """Template arguments as Metal writes them."""
    return [str(v).lower() if isinstance(v, bool) else str(v) for v in variant]


def instantiation(file: str, function: str, variant: Variant) -> str:
    """The line that makes a kernel of a template; nothing for a function that is none."""
    if not variant:
        return ""
    whole = f"{function}<{', '.join(arguments(variant))}>"
    name = kernel_name(file, function, variant)
    return f'template [[host_name("{name}")]] [[kernel]] decltype({whole}) {whole};\n'


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
