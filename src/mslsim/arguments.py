# SPDX-License-Identifier: MIT
"""Encodes the arguments of a launch as torch.mps does, and checks them against the kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .memory import Uninitialized, extent, is_tensor
from .report import Finding

BUFFERS = 31
MAX_THREADS = 1024
MAX_THREADGROUP_BYTES = 32 * 1024
MAX_GRID = 2**32 - 1
TENSOR = 16

_UNSIGNED = {"uint", "uint32_t", "ushort", "uint16_t", "uchar", "uint8_t", "unsigned"}

# torch's names for arg_casts, and their numpy types.
_CASTS: dict[str, np.dtype[Any]] = {
    name: np.dtype(name)
    for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
} | {
    "float": np.dtype("float32"),
    "float32": np.dtype("float32"),
    "float16": np.dtype("float16"),
    "half": np.dtype("float16"),
    "bool": np.dtype("bool"),
}


@dataclass(slots=True)
class Block:
    """Memory behind one or more arguments: a whole storage, so that views of it stay views."""

    address: int
    size: int
    index: int
    # Keeps what owns the memory alive.
    owner: Any = None
    # For each byte whether it was written; None where all of them were.
    written: np.ndarray[Any, np.dtype[np.uint8]] | None = None
    # What to call it where it is no parameter's.
    label: str = ""


@dataclass(slots=True)
class Pointer:
    """Eight bytes in a block that hold the address of a place in another."""

    block: Block
    at: int
    target: Block
    offset: int


@dataclass(slots=True)
class Bound:
    """A buffer argument: a place in a block."""

    index: int
    block: Block
    offset: int
    # What was passed: "buffer", or the type of a scalar.
    passed: str = "buffer"


@dataclass(slots=True)
class Encoded:
    blocks: list[Block] = field(default_factory=list)
    bound: list[Bound] = field(default_factory=list)
    pointers: list[Pointer] = field(default_factory=list)


def encode(kernel: str, args: Sequence[Any], arg_casts: Mapping[int, str] | str | None) -> Encoded:
    """Where every argument lies. Raises TypeError for what a kernel cannot take."""
    out = Encoded()
    known: dict[tuple[int, int], Block] = {}
    for index, value in enumerate(args):
        # a dict is a struct, which comes later
        if value is None or isinstance(value, Mapping):
            continue
        mark = value if isinstance(value, Uninitialized) else None
        if mark is not None:
            value = mark.array
        if is_tensor(value) or isinstance(value, np.ndarray):
            address, size, start = _extent(kernel, index, value)
            passed = "buffer"
        else:
            cast = arg_casts if isinstance(arg_casts, str) else (arg_casts or {}).get(index)
            value, passed = _scalar(kernel, index, value, cast)
            address, size, start = value.ctypes.data, value.nbytes, value.ctypes.data
        block = known.get((address, size))
        if block is None:
            block = Block(address, size, index, value)
            known[(address, size)] = block
            out.blocks.append(block)
        if mark is not None:
            if block.written is not None and block.written is not mark.written:
                raise ValueError(
                    f"{kernel}: argument {index} lies in memory that another argument marks as "
                    "uninitialized: mark one of them, and the other as its .view(...)"
                )
            block.written = mark.written
        out.bound.append(Bound(index, block, start - address, passed))
    return out


def _extent(kernel: str, index: int, value: Any) -> tuple[int, int, int]:
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        raise TypeError(f"{kernel}: argument {index} must hold numbers, got dtype {value.dtype}")
    if is_tensor(value) and value.device.type != "cpu":
        raise TypeError(
            f"{kernel}: argument {index} must be on the CPU to be simulated, "
            f"got a tensor on {value.device}"
        )
    return extent(value)


def _scalar(kernel: str, index: int, value: Any, cast: str | None) -> tuple[Any, str]:
    if cast is not None and cast not in _CASTS:
        raise ValueError(
            f"{kernel}: arg_casts[{index}] must be one of {sorted(_CASTS)}, got {cast!r}"
        )
    if isinstance(value, bytes):
        return np.frombuffer(value, np.uint8).copy(), "bytes"
    if isinstance(value, np.generic):
        return np.array([value]), f"numpy.{value.dtype.name}"
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    natural: np.dtype[Any]
    if isinstance(first, bool):
        natural = np.dtype("bool")
    elif isinstance(first, int):
        natural = np.dtype("int64")
    elif isinstance(first, float):
        natural = np.dtype("float32")
    else:
        raise TypeError(
            f"{kernel}: argument {index} must be a tensor, an array, a number, bytes or None, "
            f"got {type(value).__name__}"
        )
    chosen = _CASTS[cast] if cast else natural
    items = value if isinstance(value, (list, tuple)) else [value]
    # As C does: an int that does not fit wraps around.
    array = np.array(items, natural).astype(chosen)
    return array, cast or type(first).__name__


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the kernel's own table: what a buffer or threadgroup parameter is."""

    name: str
    is_threadgroup: bool
    index: int
    size: int
    read_only: bool
    is_reference: bool
    number: int  # 1: an integer, 2: a real, TENSOR and its axes, 0: anything else
    is_constant: bool  # in the constant address space
    is_unsigned: bool
    declared: str

    @staticmethod
    def read(parameter: tuple[str, str], r: list[int]) -> Row:
        """From a line of the table, and the name and declaration in the source."""
        name, words = parameter[0], parameter[1].split()
        is_constant, is_unsigned = "constant" in words, bool(_UNSIGNED.intersection(words))
        flags = (bool(r[3]), bool(r[4]), r[5], is_constant, is_unsigned)
        return Row(name, bool(r[0]), r[1], r[2], *flags, parameter[1])

    @property
    def label(self) -> str:
        """As the source has it; a texture's name tells its own number."""
        return self.name if "[[" in self.name else f"{self.name} [[buffer({self.index})]]"

    def holds(self, value: int) -> bool:
        """Whether the low bytes of an int, all that a short parameter reads, tell it."""
        bits = 8 * self.size
        least = 0 if self.is_unsigned else -(1 << bits - 1)
        return self.number == 1 and least <= value < least + (1 << bits)


def check_arguments(
    kernel: str, rows: list[Row], encoded: Encoded, place: tuple[str, int], strict: bool
) -> list[Finding]:
    """Findings of kind "argument": what does not fit the kernel's parameters."""
    findings = []
    buffers = {r.index: r for r in rows if not r.is_threadgroup}

    def add(message: str) -> None:
        findings.append(Finding("argument", message, kernel, *place))

    for bound in encoded.bound:
        row = buffers.get(bound.index)
        if row is None:
            add(f"argument {bound.index} is given, but the kernel has no buffer({bound.index})")
            continue
        given = bound.block.size - bound.offset
        what = row.label
        if row.is_reference and given < row.size:
            add(f"{what} needs {row.size} bytes, got {given}")
        elif strict and row.is_reference and bound.passed in ("int", "float", "bool"):
            if bound.passed == "int" and given == 8 > row.size and row.number == 1:
                value = int(bound.block.owner[0])
                if not row.holds(value):
                    add(f"{what} is {row.size} bytes, which do not hold {value}")
            elif given != row.size:
                add(
                    f"{what} is {row.size} bytes, a Python {bound.passed} is passed as {given}: "
                    f"give arg_casts={{{row.index}: ...}} or a numpy scalar"
                )
            elif (bound.passed == "float") != (row.number == 2) and row.number:
                kind = "an integer" if row.number == 1 else "a real number"
                add(f"{what} is {kind}, got a Python {bound.passed}")
    return findings


def check_launch(
    kernel: str,
    place: tuple[str, int],
    threads: tuple[int, int, int],
    group: tuple[int, int, int],
    buffers: Sequence[int],
) -> list[Finding]:
    """Findings of kind "limit": what no Apple GPU would launch."""
    findings = []
    total = group[0] * group[1] * group[2]
    if total > MAX_THREADS:
        findings.append(
            f"a threadgroup has at most {MAX_THREADS} threads, got {total} from group_size={group}"
        )
    if max(threads) > MAX_GRID:
        findings.append(f"the grid has at most {MAX_GRID} threads along an axis, got {threads}")
    if min(threads) < 1 or min(group) < 1:
        findings.append(f"the grid must not be empty, got threads={threads}, group_size={group}")
    findings += [
        f"buffer index must be below {BUFFERS}, got {i}" for i in buffers if not 0 <= i < BUFFERS
    ]
    return [Finding("limit", message, kernel, *place) for message in findings]


def three(value: Any) -> tuple[int, int, int]:
    """A size as torch takes it: a number or up to three of them."""
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    sizes = [int(v) for v in items] + [1, 1, 1]
    return sizes[0], sizes[1], sizes[2]


def copy_memory(target: int, source: int, size: int) -> None:
    ctypes.memmove(target, source, size)


def same_memory(one: int, other: int, size: int) -> bool:
    """Whether two pieces of memory hold the same bytes."""
    a, b = (np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(p)) for p in (one, other))
    return np.array_equal(a, b)
