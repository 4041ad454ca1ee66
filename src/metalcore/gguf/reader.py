# SPDX-License-Identifier: MIT
"""Reads GGUF files, also hostile ones: nothing is believed, and nothing is copied.

A number of the file is a Python integer until it is proved to fit into what the file has left, so
that no sum wraps around and nothing is allocated for a length that somebody made up.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metalcore.gguf.format import (
    ARRAY,
    BY_NUMBER,
    DEFAULT_ALIGNMENT,
    MAGIC,
    MOST_ALIGNMENT,
    MOST_DIMENSIONS,
    MOST_NAME_BYTES,
    SCALAR_BYTES,
    SCALARS,
    STRING,
    U32,
    VERSIONS,
    GGUFError,
    TensorInfo,
    padding,
)

# The least that an entry takes: a letter, a kind and a byte; a letter and one dimension.
_LEAST_KEY, _LEAST_TENSOR, _LEAST_STRING = 14, 33, 8
_FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64}


class GGUFFile:
    """A GGUF file: what it says of itself, and its tensors as views of the file.

    Args:
        path: the file; it is mapped, not read.

    Attributes:
        metadata: keys and values; arrays are lists.
        kinds: of each key, the number of its kind, or that and the kind of an array's elements.
        tensors: of each name where and how it is stored.

    Raises:
        GGUFError: the file breaks a rule; the error has the position.

    Example:
        >>> file = GGUFFile("model.gguf")
        >>> file.metadata["general.architecture"], file.tensor("output_norm.weight")
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        with self.path.open("rb") as opened:
            if self.path.stat().st_size == 0:
                raise GGUFError(f"{self.path.name} is empty", 0)
            # private, so that torch may take it for writable: no byte ever reaches the file
            self._buffer: Any = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        self._parse()

    @classmethod
    def of_bytes(cls, content: bytes | bytearray) -> "GGUFFile":
        """The same of a file that is in memory."""
        made = cls.__new__(cls)
        made.path, made._buffer = Path("memory"), bytearray(content)
        made._parse()
        return made

    def _parse(self) -> None:
        header = _Header(self._buffer)
        self.version, self.alignment = header.version, header.alignment
        self.metadata: Mapping[str, Any] = header.metadata
        self.kinds: Mapping[str, tuple[int, ...]] = header.kinds
        self.tensors: Mapping[str, TensorInfo] = header.tensors
        self.size = len(self._buffer)

    @property
    def architecture(self) -> str:
        """What the file is a model of: `llama`, `qwen3`."""
        found = self.metadata.get("general.architecture")
        if not isinstance(found, str):
            raise GGUFError("the file does not say what it is a model of: general.architecture", 0)
        return found

    def packed(self, name: str) -> Tensor:
        """The bytes of a tensor as they are in the file, uint8 [..., bytes of a row]: a view."""
        info = self.tensors[name]
        flat = torch.frombuffer(
            self._buffer, dtype=torch.uint8, count=info.bytes, offset=info.start
        )
        return flat.view(*info.shape[:-1], info.row_bytes)

    def release(self, name: str) -> None:
        """Give back the memory of a tensor's pages; they are read again when they are needed.

        Only for tensors that nobody has written to: the file does not know of it.
        """
        if not isinstance(self._buffer, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
            return
        info = self.tensors[name]
        first = info.start + padding(info.start, mmap.PAGESIZE)
        length = (info.start + info.bytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0:
            self._buffer.madvise(mmap.MADV_DONTNEED, first, length)

    def tensor(self, name: str) -> Tensor:
        """A tensor that is stored as floating point numbers: a view, if it is aligned."""
        info = self.tensors[name]
        dtype = _FLOATS.get(info.type.name)
        if dtype is None:
            raise GGUFError(f"{name} is stored as {info.type.name}: use packed()", info.start)
        packed = self.packed(name)
        # a file may begin tensors anywhere, a CPU reads numbers where they may begin
        return (packed if info.start % dtype.itemsize == 0 else packed.clone()).view(dtype)


class _Header:
    """All before the weights, read from front to back."""

    def __init__(self, buffer: Any) -> None:
        self._buffer, self._size, self._at = buffer, len(buffer), 0
        self.metadata: dict[str, Any] = {}
        self.kinds: dict[str, tuple[int, ...]] = {}
        self.tensors: dict[str, TensorInfo] = {}

        if self._take(4, "the magic") != MAGIC:
            raise GGUFError("no GGUF file: it does not begin with GGUF", 0)
        self.version = self._number("I", "the version")
        if self.version not in VERSIONS:
            raise GGUFError(f"version {self.version}; versions 2 and 3 can be read", 4)
        tensors = self._count("tensors")
        keys = self._count("keys")
        self._expect_room(keys, _LEAST_KEY, "keys", 16)
        for _ in range(keys):
            self._key()
        self.alignment = self._alignment()
        self._expect_room(tensors, _LEAST_TENSOR, "tensors", 8)
        entries = [self._tensor() for _ in range(tensors)]
        self._place(entries)

    # -- what a file is made of

    def _take(self, size: int, what: str) -> bytes:
        if size > self._size - self._at:
            left = self._size - self._at
            raise GGUFError(f"{what} needs {size} bytes, the file has {left} left", self._at)
        taken: bytes = self._buffer[self._at : self._at + size]
        self._at += size
        return bytes(taken)

    def _number(self, letter: str, what: str) -> Any:
        return struct.unpack(f"<{letter}", self._take(struct.calcsize(f"<{letter}"), what))[0]

    def _count(self, what: str) -> int:
        return int(self._number("Q", f"the number of {what}"))

    def _expect_room(self, count: int, least: int, what: str, position: int) -> None:
        left = self._size - self._at
        if count * least > left:
            raise GGUFError(
                f"{count} {what} take at least {count * least} bytes, the file has {left} left",
                position,
            )

    def _string(self, what: str) -> str:
        position = self._at
        length = self._number("Q", f"the length of {what}")
        taken = self._take(length, what)
        try:
            return taken.decode()
        except UnicodeDecodeError as error:
            raise GGUFError(f"{what} is no UTF-8", position + 8 + error.start) from error

    # -- metadata

    def _key(self) -> None:
        position = self._at
        key = self._string("a key")
        if not key:
            raise GGUFError("a key is empty", position)
        if key in self.metadata:
            raise GGUFError(f"the key {key!r} is there twice", position)
        kind = self._number("I", f"the kind of {key!r}")
        self.kinds[key] = (kind,)
        if kind == ARRAY:
            element, self.metadata[key] = self._array(key)
            self.kinds[key] = (kind, element)
        else:
            self.metadata[key] = self._scalar(kind, key)

    def _scalar(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self._string(f"the value of {key!r}")
        if kind not in SCALARS:
            raise GGUFError(f"{key!r} is of kind {kind}, which there is not", self._at - 4)
        if SCALARS[kind] == "?":
            position, value = self._at, self._number("B", f"the value of {key!r}")
            if value > 1:
                raise GGUFError(f"{key!r} is true or false, and the byte is {value}", position)
            return bool(value)
        return self._number(SCALARS[kind], f"the value of {key!r}")

    def _array(self, key: str) -> tuple[int, list[Any]]:
        position = self._at
        element = self._number("I", f"the kind of the elements of {key!r}")
        if element == ARRAY:
            raise GGUFError(f"{key!r} is an array of arrays", position)
        if element != STRING and element not in SCALARS:
            raise GGUFError(f"{key!r} has elements of kind {element}, which there is not", position)
        count = self._count(f"elements of {key!r}")
        size = _LEAST_STRING if element == STRING else SCALAR_BYTES[element]
        self._expect_room(count, size, f"elements of {key!r}", position + 4)
        if element == STRING:
            return element, [self._string(f"an element of {key!r}") for _ in range(count)]
        taken = self._take(count * size, f"the elements of {key!r}")
        return element, list(struct.unpack(f"<{count}{SCALARS[element]}", taken))

    def _alignment(self) -> int:
        key = "general.alignment"
        if key not in self.metadata:
            return DEFAULT_ALIGNMENT
        value = self.metadata[key]
        if self.kinds[key] != (U32,):
            raise GGUFError(f"{key} is no 32-bit unsigned number, got {value!r}", self._at)
        if not 1 <= value <= MOST_ALIGNMENT or value & (value - 1):
            raise GGUFError(
                f"{key} is a power of two up to {MOST_ALIGNMENT}, got {value}", self._at
            )
        return int(value)

    # -- tensors

    def _tensor(self) -> tuple[TensorInfo, int]:
        """A tensor with `start` counted from the data, and where the file says so."""
        position = self._at
        name = self._string("the name of a tensor")
        if not 0 < len(name.encode()) <= MOST_NAME_BYTES:
            raise GGUFError(
                f"the name of a tensor has 1 to {MOST_NAME_BYTES} bytes, got {name[:80]!r}",
                position,
            )
        dimensions = self._number("I", f"the number of dimensions of {name!r}")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise GGUFError(
                f"{name!r} has {dimensions} dimensions; 1 to {MOST_DIMENSIONS} are possible",
                self._at - 4,
            )
        at = self._at
        sizes = [self._number("Q", f"a size of {name!r}") for _ in range(dimensions)]
        if min(sizes) < 1 or math.prod(sizes) >= 2**63:
            raise GGUFError(f"{name!r} has the sizes {sizes}", at)
        number = self._number("I", f"the type of {name!r}")
        if number not in BY_NUMBER:
            raise GGUFError(f"{name!r} is of type {number}, which is not known", self._at - 4)
        kind = BY_NUMBER[number]
        if sizes[0] % kind.block:
            raise GGUFError(
                f"{name!r} has rows of {sizes[0]}, and {kind.name} has blocks of {kind.block}", at
            )
        offset = self._number("Q", f"the offset of {name!r}")
        if offset % self.alignment:
            raise GGUFError(
                f"{name!r} begins at {offset}, no multiple of {self.alignment}", self._at - 8
            )
        size = math.prod(sizes) // kind.block * kind.bytes
        return TensorInfo(name, tuple(reversed(sizes)), kind, offset, size), position

    def _place(self, entries: list[tuple[TensorInfo, int]]) -> None:
        """Where the tensors are in the file; they lie inside it and beside each other."""
        data = self._at + padding(self._at, self.alignment)
        for info, position in entries:
            if info.name in self.tensors:
                raise GGUFError(f"the tensor {info.name!r} is there twice", position)
            if info.start + info.bytes > self._size - data:
                left = max(0, self._size - data)
                raise GGUFError(
                    f"{info.name!r} is {info.bytes} bytes from {info.start} on, "
                    f"and the file has {left} bytes of tensors",
                    position,
                )
            start = data + info.start
            self.tensors[info.name] = TensorInfo(
                info.name, info.shape, info.type, start, info.bytes
            )
        end, before = 0, ""
        for info, position in sorted(entries, key=lambda entry: entry[0].start):
            if info.start < end:
                raise GGUFError(f"{info.name!r} overlaps {before!r}", position)
            end, before = info.start + info.bytes, info.name
