# SPDX-License-Identifier: MIT
"""Writes GGUF files, byte for byte what the `gguf` package writes for the same content."""

import ctypes
import struct
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from metalcore._check import expect
from metalcore.gguf.format import (
    ARRAY,
    BOOL,
    BY_NAME,
    DEFAULT_ALIGNMENT,
    F32,
    I32,
    MAGIC,
    MOST_DIMENSIONS,
    MOST_NAME_BYTES,
    SCALARS,
    STRING,
    U32,
    padding,
)


class Value(NamedTuple):
    """A value whose kind is said, because it does not follow from the value."""

    value: Any
    kind: int
    element: int | None = None


class Stored(NamedTuple):
    """A tensor as it is to be stored: `data` is uint8 [..., bytes of a row] or plain numbers."""

    data: Tensor
    type: str


def write_gguf(
    path: str | PathLike[str],
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Stored],
    *,
    alignment: int = DEFAULT_ALIGNMENT,
) -> None:
    """Write a GGUF file of version 3.

    Args:
        path: the file; it is there as a whole or not at all.
        metadata: keys and values in their order. Python's int is stored as u32, float as f32; a
            `Value` says its own kind.
        tensors: names and tensors in their order.
        alignment: where tensors begin; other than 32 is also written as `general.alignment`.
    """
    metadata = dict(metadata)
    if alignment != DEFAULT_ALIGNMENT:
        metadata["general.alignment"] = Value(alignment, U32)
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(MAGIC + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
            for key, value in metadata.items():
                file.write(_string(key) + _value(key, value))
            _write_tensors(file, tensors, alignment)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _write_tensors(file: BinaryIO, tensors: Mapping[str, Stored], alignment: int) -> None:
    offset = 0
    for name, tensor in tensors.items():
        shape = _shape(name, tensor)
        file.write(_string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape)))
        file.write(struct.pack("<IQ", BY_NAME[tensor.type].number, offset))
        offset += tensor.data.nbytes + padding(tensor.data.nbytes, alignment)
    file.write(bytes(padding(file.tell(), alignment)))
    for tensor in tensors.values():
        data = tensor.data.detach().cpu().contiguous()
        file.write((ctypes.c_char * data.nbytes).from_address(data.data_ptr()))
        file.write(bytes(padding(data.nbytes, alignment)))


def _shape(name: str, tensor: Stored) -> tuple[int, ...]:
    kind, data = BY_NAME[tensor.type], tensor.data
    expect(
        0 < len(name.encode()) <= MOST_NAME_BYTES and 1 <= data.dim() <= MOST_DIMENSIONS,
        "write_gguf",
        f"a tensor has a name of up to {MOST_NAME_BYTES} bytes and 1 to {MOST_DIMENSIONS} "
        f"dimensions, got {name!r} with {data.dim()}",
    )
    if kind.block == 1:
        return tuple(data.shape)
    expect(
        data.dtype == torch.uint8 and data.shape[-1] % kind.bytes == 0,
        "write_gguf",
        f"{name!r} must be uint8 with rows of whole {kind.name} blocks of {kind.bytes} bytes, got "
        f"{data.dtype} {list(data.shape)}",
    )
    return *data.shape[:-1], data.shape[-1] // kind.bytes * kind.block


def _string(text: str | bytes) -> bytes:
    encoded = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(encoded)) + encoded


def _kind(key: str, value: Any) -> int:
    for kinds, number in (((bool,), BOOL), ((int,), U32), ((float,), F32), ((str, bytes), STRING)):
        if isinstance(value, kinds):
            return number
    expect(
        isinstance(value, Sequence), "write_gguf", f"{key!r} has a value of {type(value).__name__}"
    )
    return ARRAY


def _value(key: str, value: Any) -> bytes:
    if not isinstance(value, Value):
        value = Value(value, _kind(key, value))
    head = struct.pack("<I", value.kind)
    if value.kind == STRING:
        return head + _string(value.value)
    if value.kind != ARRAY:
        return head + struct.pack(f"<{SCALARS[value.kind]}", value.value)
    element = value.element
    if element is None:
        expect(len(value.value) > 0, "write_gguf", f"{key!r} is an empty array, which has no kind")
        element = _kind(key, value.value[0])
        # of the numbers of an array Python's int is signed for the `gguf` package
        element = I32 if element == U32 else element
    head += struct.pack("<IQ", element, len(value.value))
    if element == STRING:
        return head + b"".join(map(_string, value.value))
    return head + struct.pack(f"<{len(value.value)}{SCALARS[element]}", *value.value)
