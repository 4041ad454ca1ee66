# SPDX-License-Identifier: MIT
"""The sentences of a race: both accesses, their values, and the barrier that does not help."""

from __future__ import annotations

import struct
from collections.abc import Callable

from .sites import Site
from .worker import Found

# BarrierRole of machine/memory.h.
_PASSED, _SINCE = 1, 3
_FLAGS = ((1, "mem_device"), (2, "mem_threadgroup"), (4, "mem_texture"))
CODES = {"float": "f", "half": "e", "char": "b", "uchar": "B", "short": "h", "ushort": "H",
          "int": "i", "uint": "I", "long": "q", "ulong": "Q", "bool": "?"}  # fmt: skip
CODES |= {f"{n}_t": CODES[m] for n, m in (
    ("int8", "char"), ("uint8", "uchar"), ("int16", "short"), ("uint16", "ushort"),
    ("int32", "int"), ("uint32", "uint"), ("int64", "long"), ("uint64", "ulong"))}  # fmt: skip


def told(
    f: Found, memory: str, declared: str, is_threadgroup: bool, site: Callable[[int], Site]
) -> str:
    """What a race finding says. `declared` is the type of the memory as the source has it."""
    mine, other = ("write" if f.writes & bit else "read" for bit in (1, 2))
    line = _line(site(f.other_site))
    if f.other_group != f.group:
        return (
            f"{mine} of {memory} by thread {f.thread} of threadgroup {f.group} and {other} by "
            f"thread {f.other_thread} of threadgroup {f.other_group} at "
            f"{line}: nothing orders threadgroups{_values(f, declared)}"
        )
    return (
        f"{mine} of {memory} by thread {f.thread} and {other} by thread {f.other_thread} at "
        f"{line}, no barrier between (threadgroup {f.group}){_values(f, declared)}"
        f"{_barrier(f, is_threadgroup, site)}"
    )


def _line(site: Site) -> str:
    return f"{site.file}:{site.line}" if site.line else "an unknown line"


def _values(f: Found, declared: str) -> str:
    """Where the later of the two wrote, both values are known."""
    code = next((CODES[word] for word in declared.split() if word in CODES), "")
    values = [v.to_bytes(8, "little")[: f.size] for v in (f.value, f.other_value)]
    is_bfloat = "bfloat" in declared.split() and f.size == 2
    if is_bfloat:
        code, values = "f", [b"\0\0" + v for v in values]
    if not code or struct.calcsize(code) != len(values[0]) or values[0] == values[1]:
        return ""
    numbers = [struct.unpack(code, v)[0] for v in values]
    text = [f"{n:.6g}" if isinstance(n, float) else str(int(n)) for n in numbers]
    return f"; the values are {text[0]} and {text[1]}"


def _barrier(f: Found, is_threadgroup: bool, site: Callable[[int], Site]) -> str:
    """Why a barrier that a reader would see does not order the two accesses."""
    lanes = site(f.simd_site)
    if _between(f, lanes, site):
        start = f"; the simdgroup_barrier at {_line(lanes)} does not count: "
        return f"{start}it orders one simdgroup, and these are threads of two"
    at = site(f.barrier_site)
    if not f.barrier or not at.line:
        return ""
    if f.barrier == _SINCE:
        return _later_turn(f, at, site)
    name = "threadgroup_barrier" if f.barrier == _PASSED else "simdgroup_barrier"
    start = f"; the {name} at {_line(at)} does not count: "
    flags = " | ".join(n for bit, n in _FLAGS if f.barrier_flags & bit) or "mem_none"
    return f"{start}{flags} does not order {'threadgroup' if is_threadgroup else 'device'} memory"


def _between(f: Found, at: Site, site: Callable[[int], Site]) -> Site | None:
    """The first of the two places in the text, if `at` is between them."""
    first, second = site(f.site), site(f.other_site)
    early, late = sorted((first, second), key=lambda s: s.line)
    same_file = first.file == second.file == at.file
    return early if same_file and early.line < at.line <= late.line else None


def _later_turn(f: Found, at: Site, site: Callable[[int], Site]) -> str:
    """Both accesses come after the barrier `at`: the one on a line before it has come round."""
    first, early = site(f.site), _between(f, at, site)
    if early is None:
        return ""
    verb = "write" if f.writes & (1 if early is first else 2) else "read"
    when = "turn of the loop" if early.calls == at.calls else "call"
    return (
        f"; the barrier at {_line(at)} is before both, since the {verb} at line {early.line} "
        f"is of the next {when}"
    )
