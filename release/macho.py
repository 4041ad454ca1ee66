# SPDX-License-Identifier: MIT
"""Reads macOS libraries on any machine: what they export, need, and are built for."""

import struct
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

_MAGIC, _ARM64 = 0xFEEDFACF, 0x0100000C
_SYMTAB, _ID_DYLIB, _RPATH, _SIGNATURE, _BUILD_VERSION = 0x2, 0xD, 0x8000001C, 0x1D, 0x32
_NEEDS = {0xC, 0x80000018, 0x8000001F, 0x80000023}  # also weakly, or to export again
_EXTERNAL, _PRIVATE, _DEBUG, _TYPE = 0x01, 0x10, 0xE0, 0x0E

_NAME = np.dtype(
    [("name", "<u4"), ("type", "u1"), ("section", "u1"), ("flags", "<u2"), ("value", "<u8")]
)


class Imported(NamedTuple):
    """A name that a library takes from another."""

    name: str
    library: str


@dataclass
class Library:
    """A Mach-O library for arm64."""

    install_name: str = ""
    minimum_macos: str = ""
    is_signed: bool = False
    needs: list[str] = field(default_factory=list)
    rpaths: list[str] = field(default_factory=list)
    exports: set[str] = field(default_factory=set)
    imports: list[Imported] = field(default_factory=list)


def read(data: bytes) -> Library:
    """What the file with these bytes is.

    Raises:
        ValueError: it is no Mach-O file for arm64.
    """
    magic, processor, _, _, commands = struct.unpack_from("<IiIII", data)
    if (magic, processor) != (_MAGIC, _ARM64):
        raise ValueError("must be a Mach-O library for arm64")
    found, at = Library(), 32
    symbols = (0, 0, 0, 0)
    for _ in range(commands):
        command, size = struct.unpack_from("<II", data, at)
        if command == _SYMTAB:
            symbols = struct.unpack_from("<4I", data, at + 8)
        elif command in _NEEDS:
            found.needs.append(_text(data, at, size))
        elif command == _ID_DYLIB:
            found.install_name = _text(data, at, size)
        elif command == _RPATH:
            found.rpaths.append(_text(data, at, size))
        elif command == _SIGNATURE:
            found.is_signed = struct.unpack_from("<I", data, at + 12)[0] > 0
        elif command == _BUILD_VERSION:
            version = struct.unpack_from("<I", data, at + 12)[0]
            found.minimum_macos = f"{version >> 16}.{version >> 8 & 255}"
        at += size
    _read_symbols(found, data, *symbols)
    return found


def _read_symbols(found: Library, data: bytes, at: int, count: int, texts: int, size: int) -> None:
    table = np.frombuffer(data, _NAME, count, at)
    strings = data[texts : texts + size]
    kind = table["type"]
    outside = (kind & _EXTERNAL != 0) & (kind & _PRIVATE == 0) & (kind & _DEBUG == 0)
    undefined = kind & _TYPE == 0

    def name(row: np.void) -> str:
        start = int(row["name"])
        return strings[start : strings.index(b"\0", start)].decode()

    found.exports = {name(row) for row in table[outside & ~undefined]}
    for row in table[outside & undefined]:
        number = int(row["flags"]) >> 8  # of the library in the order of `needs`, from 1
        library = found.needs[number - 1] if 1 <= number <= len(found.needs) else ""
        found.imports.append(Imported(name(row), library))


def _text(data: bytes, at: int, size: int) -> str:
    """The text at the end of a load command."""
    start = at + struct.unpack_from("<I", data, at + 8)[0]
    return data[start : at + size].split(b"\0", 1)[0].decode()
