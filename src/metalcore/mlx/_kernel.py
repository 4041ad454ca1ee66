# SPDX-License-Identifier: MIT
"""Kernels as MLX wants them: it writes the signature, and takes a body and what stands before it.

Our text stays as it is. The body is that of the kernel; lines before it give MLX's parameters the
names and types that the kernel declares. What is behind a pointer is `device` memory: MLX calls
arrays of fewer than eight values `constant`, so no array that small is given (`_run.py`).
"""

import re
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.core.fast import metal_kernel as metal_kernel

from metalcore.metal import source
from metalcore.metal.source import Variant
from metalcore.metal.text.signature import Parameter, Position, without_kernels

LEAST = 8
"""Values of an array that MLX takes for `device` memory."""

SCALARS = {"uint": mx.uint32, "int": mx.int32, "long": mx.int64, "float": mx.float32}
"""The dtype of a number, by what the kernel declares."""

# MLX gives those in three dimensions; the others are numbers.
_IN_SPACE = re.compile(r"thread(s|group|groups)?_(position|per)_(in_)?(grid|threadgroup)")


class Text:
    """What makes one kernel: its name, the names of what it takes and gives, text before and in."""

    def __init__(self, file: str, function: str, variant: Variant) -> None:
        declared = source.signature(file, function)
        self.name = source.kernel_name(file, function, variant)
        self.inputs = [given(p) for p in declared.parameters if not p.is_written]
        self.outputs = [given(p) for p in declared.parameters if p.is_written]
        self.header = _tables(without_kernels(source.read(file), source.signatures(file)))
        arguments = zip(declared.template, source.arguments(variant), strict=True)
        lines = [
            f"using {t.name} = {value};"
            if _is_type(t.type)
            else f"constexpr {t.type} {t.name} = {value};"
            for t, value in arguments
        ]
        lines += [_parameter(p) for p in declared.parameters]
        lines += [_position(p) for p in declared.others]
        # in the same scope: threadgroup memory is declared in that of the kernel alone
        self.body = "\n".join([*lines, _tables(declared.body)])


@cache
def text(file: str, function: str, variant: Variant) -> Text:
    return Text(file, function, variant)


@cache
def compiled(file: str, function: str, variant: Variant) -> Any:
    """What `mx.fast.metal_kernel` makes of it."""
    t = text(file, function, variant)
    return metal_kernel(
        name=t.name,
        input_names=t.inputs,
        output_names=t.outputs,
        source=t.body,
        header=t.header,
        ensure_row_contiguous=True,
    )


def given(parameter: Parameter) -> str:
    """What MLX calls it. MLX adds parameters where a name followed by `_shape` is in the text."""
    return f"{parameter.name}_given"


def _is_type(kind: str) -> bool:
    return kind in ("typename", "class")


def _tables(text: str) -> str:
    """Tables of numbers are `device` memory here, whatever their length."""
    return re.sub(r"\bconstant (long|float|uint|int)\s*\*", r"device const \1*", text)


def _parameter(p: Parameter) -> str:
    if p.is_scalar:
        return f"const {p.type} {p.name} = {p.type}({given(p)});"
    kind = f"device {'' if p.is_written else 'const '}{p.type}*"
    return f"{kind} {p.name} = ({kind}){given(p)};"


def _position(p: Position) -> str:
    kind = p.declaration.split(" ")[0]
    size = re.search(r"[234]$", kind)
    part = (
        "" if not _IN_SPACE.fullmatch(p.attribute) else "." + "xyz"[: int(size[0]) if size else 1]
    )
    if part == ".xyz":
        part = ""
    return f"{kind} {p.name} = {kind}({p.attribute}{part});"
