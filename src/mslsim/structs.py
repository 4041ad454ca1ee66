# SPDX-License-Identifier: MIT
"""Packs a Python dict as a struct of the kernel's source; arrays in it become pointers. A tensor of
Metal 4 is a struct of the machine's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arguments import TENSOR, Block, Bound, Encoded, Pointer, Row
from .memory import Uninitialized, extent, is_tensor

Structs = Mapping[str, Sequence[tuple[str, str, int]]]

_NUMBERS = {
    "bool": "?", "char": "i1", "int8_t": "i1", "uchar": "u1", "uint8_t": "u1",
    "short": "i2", "int16_t": "i2", "ushort": "u2", "uint16_t": "u2", "half": "f2",
    "int": "i4", "int32_t": "i4", "uint": "u4", "uint32_t": "u4", "float": "f4",
    "long": "i8", "int64_t": "i8", "ulong": "u8", "uint64_t": "u8", "size_t": "u8",
}  # fmt: skip
# Room of msl::TensorHeader.
_TENSOR_AXES = 16
_VECTOR = re.compile(r"(packed_)?([a-z]+)([234])$")


@dataclass(frozen=True, slots=True)
class Layout:
    """Bytes and alignment of a type, and how many numbers of which kind it is: none, a struct."""

    size: int
    align: int
    dtype: str = ""
    count: int = 1


def layout_of(kind: str, structs: Structs) -> Layout:
    """Raises KeyError for a type that is unknown."""
    if kind.endswith("*"):
        return Layout(8, 8, "u8")
    if kind in _NUMBERS:
        size = np.dtype(_NUMBERS[kind]).itemsize
        return Layout(size, size, _NUMBERS[kind])
    if (match := _VECTOR.match(kind)) and match[2] in _NUMBERS:
        size, n = np.dtype(_NUMBERS[match[2]]).itemsize, int(match[3])
        whole = size * (n if match[1] or n != 3 else 4)
        return Layout(whole, size if match[1] else whole, _NUMBERS[match[2]], n)
    end, align = 0, 1
    for _, part, count in structs[kind]:
        inner = layout_of(part, structs)
        end = -(-end // inner.align) * inner.align + inner.size * max(1, count)
        align = max(align, inner.align)
    return Layout(-(-end // align) * align, align)


def add_struct(
    encoded: Encoded, index: int, what: str, kind: str, values: Mapping[str, Any], structs: Structs
) -> None:
    """Adds a struct as buffer `index`, and what its pointers point to."""
    memory = np.zeros(layout_of(kind, structs).size, np.uint8)
    block = Block(memory.ctypes.data, memory.nbytes, index, memory)
    encoded.blocks.append(block)
    encoded.bound.append(Bound(index, block, 0, "struct"))
    _fill(encoded, block, memory, what, kind, values, structs)


def _fill(
    encoded: Encoded,
    block: Block,
    memory: np.ndarray[Any, np.dtype[np.uint8]],
    what: str,
    kind: str,
    values: Mapping[str, Any],
    structs: Structs,
) -> None:
    members = structs[kind]
    if unknown := set(values) - {name for name, _, _ in members}:
        raise ValueError(f"{what}: {kind} has no member {sorted(unknown)}")
    end = 0
    for name, part, count in members:
        inner = layout_of(part, structs)
        at = -(-end // inner.align) * inner.align
        end = at + inner.size * max(1, count)
        if name not in values:
            continue
        value = values[name]
        if part.endswith("*"):
            start = memory.ctypes.data - block.address
            _point(encoded, block, start + at, f"{what}.{name}", value)
        elif not inner.dtype:
            items = value if count else [value]
            for i, item in enumerate(items):
                target = memory[at + i * inner.size :][: inner.size]
                _fill(encoded, block, target, f"{what}.{name}", part, item, structs)
        else:
            dtype = np.dtype(inner.dtype)
            numbers = np.array(value).astype(dtype).reshape(max(1, count), inner.count)
            padded = np.zeros((max(1, count), inner.size // dtype.itemsize), dtype)
            padded[:, : inner.count] = numbers
            memory[at:end] = padded.view(np.uint8).reshape(-1)


def add_tensor(encoded: Encoded, row: Row, what: str, given: Any) -> None:
    """Adds an array for a tensor parameter, as msl::TensorHeader has it: innermost axis first."""
    value = given.array if isinstance(given, Uninitialized) else given
    if is_tensor(value):
        item, strides = value.element_size(), [n * value.element_size() for n in value.stride()]
    elif isinstance(value, np.ndarray):
        item, strides = value.itemsize, list(value.strides)
    else:
        raise TypeError(f"{what} is a tensor, which takes an array, got {type(value).__name__}")
    rank = row.number - TENSOR
    if (len(value.shape), item) != (rank, row.size):
        raise TypeError(
            f"{what} has {rank} axes and elements of {row.size} bytes, "
            f"got shape {tuple(value.shape)} of {value.dtype}"
        )
    header = np.zeros(1 + 2 * _TENSOR_AXES, np.int64)
    header[1 : 1 + rank] = value.shape[::-1]
    header[1 + _TENSOR_AXES :][:rank] = [n // item for n in strides[::-1]]
    block = Block(header.ctypes.data, header.nbytes, row.index, header)
    encoded.blocks.append(block)
    encoded.bound.append(Bound(row.index, block, 0))
    _point(encoded, block, 0, row.label, value)
    if isinstance(given, Uninitialized):
        encoded.pointers[-1].target.written = given.written


def _point(encoded: Encoded, block: Block, at: int, what: str, value: Any) -> None:
    if value is None:
        return
    if not is_tensor(value) and not isinstance(value, np.ndarray):
        raise TypeError(f"{what} is a pointer, which takes an array or a tensor")
    address, size, start = extent(value)
    target = next((b for b in encoded.blocks if (b.address, b.size) == (address, size)), None)
    if target is None:
        target = Block(address, size, block.index, value, label=what)
        encoded.blocks.append(target)
    encoded.pointers.append(Pointer(block, at, target, start - address))
