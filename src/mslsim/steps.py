# SPDX-License-Identifier: MIT
"""What one thread of a launch does, step by step: its loads, stores and branches."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .findings import Labels
from .races import CODES
from .sites import Site
from .worker import REGIONS, TraceEvent

# So many steps are kept.
ROOM = 1 << 16
_READ, _WRITE, _BRANCH, _BARRIER, _COLLECTIVE = range(5)
_ARENA = REGIONS - 1


@dataclass(frozen=True, slots=True)
class Step:
    """One step: `action` is "read", "write", "atomic read", "atomic write", "branch", "barrier" or
    "simd". A read or a write has the memory, the byte in it, and its values where their type is
    known."""

    file: str
    line: int
    action: str
    memory: str = ""
    byte: int = 0
    values: tuple[float | int, ...] = ()

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else "?"
        if self.action == "branch":
            return f"{where}: goes here"
        if not self.memory:
            return f"{where}: {self.action}"
        shown = ", ".join(f"{v:.9g}" if isinstance(v, float) else str(v) for v in self.values)
        equals = f" = {shown}" if shown else ""
        return f"{where}: {self.action} of byte {self.byte} of {self.memory}{equals}"


@dataclass(frozen=True, slots=True)
class Traced:
    """The thread to trace: its threadgroup, and its index in it."""

    group: int
    thread: int


def thread_at(position: Sequence[int], grid: Sequence[int], group: Sequence[int]) -> Traced:
    """The thread at a position in the grid."""
    at = [*position, 0, 0][:3]
    if any(not 0 <= p < n for p, n in zip(at, grid, strict=True)):
        raise ValueError(f"thread must be inside of the grid {tuple(grid)}, got {tuple(at)}")
    groups = [-(-n // g) for n, g in zip(grid, group, strict=True)]
    place = [p // g for p, g in zip(at, group, strict=True)]
    inside = [p % g for p, g in zip(at, group, strict=True)]
    # the last group along an axis may be smaller
    size = [min(g, n - p * g) for g, n, p in zip(group, grid, place, strict=True)]
    return Traced(
        place[0] + groups[0] * (place[1] + groups[1] * place[2]),
        inside[0] + size[0] * (inside[1] + size[1] * inside[2]),
    )


def read_steps(address: int, count: int, sites: list[Site], labels: Labels) -> list[Step]:
    """The steps that a worker left at `address`. Of branches, those to another line."""
    events = (TraceEvent * count).from_address(address)
    steps: list[Step] = []
    line = ("", 0)
    for e in events:
        site = sites[e.site] if e.site < len(sites) else sites[0]
        place = (site.file, site.line)
        if e.kind == _BRANCH and (place == line or not site.line or (not line[1] and not steps)):
            continue
        line = place
        steps.append(_step(e, place, labels))
    return steps


def _step(e: TraceEvent, place: tuple[str, int], labels: Labels) -> Step:
    if e.kind in (_BRANCH, _BARRIER, _COLLECTIVE):
        names: Mapping[int, str] = {_BRANCH: "branch", _BARRIER: "barrier", _COLLECTIVE: "simd"}
        return Step(*place, names[e.kind])
    action = ("atomic " if e.atomic else "") + ("read" if e.kind == _READ else "write")
    if e.region == _ARENA:
        memory = f"threadgroup {labels.arrays.get(e.slot, 'memory')}"
        declared = labels.array_types.get(e.slot, "")
    else:
        memory = labels.names.get(e.region, "a buffer that is not bound")
        declared = labels.types.get(e.region, "")
    return Step(*place, action, memory, e.offset, _values(bytes(e.value)[: e.size], declared))


def _values(data: bytes, declared: str) -> tuple[Any, ...]:
    """`data` as numbers of the declared type, which may be a vector."""
    for word in declared.split():
        scalar = word.removeprefix("packed_").rstrip("234")
        if scalar == "bfloat" and len(data) % 2 == 0:
            parts = [b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2)]
            return tuple(struct.unpack("f", p)[0] for p in parts)
        code = CODES.get(word) or CODES.get(scalar)
        if code and len(data) % struct.calcsize(code) == 0:
            return struct.unpack(f"{len(data) // struct.calcsize(code)}{code}", data)
    return ()


EVENT_BYTES = ctypes.sizeof(TraceEvent)
