# SPDX-License-Identifier: MIT
"""Makes sentences of the numbers a checked run leaves behind."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import races
from .arguments import MAX_THREADGROUP_BYTES, Encoded, Row
from .report import Finding
from .sites import Site
from .worker import REGIONS, Found, Session

_RACE = 2
_ARENA = REGIONS - 1
_NONE = 0xFFFFFFFF
_INDEXED = re.compile(r"([A-Za-z_][\w.]*)\s*\[(?!\[)")
_ORDERS = ("ascending", "descending", "random")


@dataclass(frozen=True, slots=True)
class Labels:
    """What to call memory: buffers by region, arrays in threadgroup memory by slot. `elements` has
    the bytes of one element by region, the types are as the source has them."""

    names: dict[int, str]
    types: dict[int, str]
    elements: dict[int, int]
    arrays: dict[int, str]
    array_types: dict[int, str]


def describe(
    kernel: str,
    session: Session,
    sites: list[Site],
    labels: Labels,
    place: tuple[str, int],
    line_text: Callable[[str, int], str],
) -> list[Finding]:
    """The findings of a session, one for each kind and line. `line_text` gives lines of source."""
    teller = _Teller(kernel, session, sites, labels, place, line_text)
    findings: list[Finding] = []
    seen = set()
    for found in session.found[: session.found_count]:
        if found.kind == _RACE:
            _put_later_line_first(found, sites)
        finding = teller.tell(found)
        other = sites[found.other_site].line if found.kind == _RACE else 0
        key = (finding.kind, finding.file, finding.line, other)
        if key not in seen:
            seen.add(key)
            findings.append(finding)
    return findings


def _put_later_line_first(f: Found, sites: list[Site]) -> None:
    """A race between two lines is one finding, at the later line, whichever ran first."""
    mine, other = sites[f.site], sites[f.other_site]
    if mine.file == other.file and other.line > mine.line:
        f.site, f.other_site = f.other_site, f.site
        f.thread, f.other_thread = f.other_thread, f.thread
        f.group, f.other_group = f.other_group, f.group
        f.value, f.other_value = f.other_value, f.value
        f.writes = (f.writes >> 1 & 1) | (f.writes & 1) << 1


class _Teller:
    def __init__(
        self,
        kernel: str,
        session: Session,
        sites: list[Site],
        labels: Labels,
        place: tuple[str, int],
        line_text: Callable[[str, int], str],
    ) -> None:
        self.kernel = kernel
        self.session = session
        self.sites = sites
        self.names = labels.names
        self.labels = labels
        self.place = place
        self.line_text = line_text
        self.makers: dict[int, Callable[[Found], tuple[str, str]]] = {
            1: self._bounds,
            2: self._race,
            3: self._uninitialized,
            4: self._barrier,
            5: self._simd,
            6: self._lane,
            7: self._schedule,
            8: lambda f: ("crash", "the kernel used an address that is not mapped"),
            9: self._index,
            10: lambda f: ("division", f"integer division by zero by {_thread(f)}"),
            13: self._texel,
            12: lambda f: ("assertion", f"an assertion does not hold for {_thread(f)}"),
            11: lambda f: ("limit", f"no room for {f.block_bytes} bytes of threadgroup memory"),
        }

    def tell(self, f: Found) -> Finding:
        kind, message = self.makers[f.kind](f)
        site = self.site(f.site)
        file, line = (site.file, site.line) if site.line else self.place
        threads = tuple(t for t in (f.thread, f.other_thread) if t != _NONE)
        group = -1 if f.group == _NONE else f.group
        return Finding(
            kind, message, self.kernel, file, line, threads, group, is_note=bool(f.harmless)
        )

    def site(self, number: int) -> Site:
        return self.sites[number] if number < len(self.sites) else self.sites[0]

    def _line(self, number: int) -> str:
        site = self.site(number)
        return f"{site.file}:{site.line}" if site.line else "an unknown line"

    def _memory(self, f: Found) -> tuple[str, int]:
        """What to call the memory of an access, and where in it the access begins."""
        if f.region != _ARENA:
            return self.names.get(f.region, "a buffer that is not bound"), f.offset
        name = self.labels.arrays.get(f.block_slot, "memory")
        return f"threadgroup {name}", f.offset - f.block_offset

    def _bounds(self, f: Found) -> tuple[str, str]:
        verb = "write" if f.writes & 1 else "read"
        what, at = self._memory(f)
        if f.region == _ARENA:
            what = f"{what} of {f.block_bytes} bytes"
        elif f.region in self.names:
            what = f"{what} of {self.session.regions[f.region].bytes} bytes"
        where = f"at byte {at}" if at >= 0 else f"{-at} bytes before the start"
        if (element := self.labels.elements.get(f.region, 0)) and at % element == 0:
            where += f" (index {at // element})"
        return "bounds", f"{verb} of {f.size} bytes {where} of {what} by {_thread(f)}"

    def _texel(self, f: Found) -> tuple[str, str]:
        verb = "write" if f.writes & 1 else "read"
        signed = (f.offset, *(v - 2**32 if v >> 31 else v for v in (f.block_offset, f.block_bytes)))
        what = self.names.get(f.region, "a texture that is not bound")
        return "bounds", f"{verb} of texel {signed} outside of {what} by {_thread(f)}"

    def _index(self, f: Found) -> tuple[str, str]:
        site = self.site(f.site)
        name = _indexed(self.line_text(site.file, site.line), site.column - 1)
        array = f"{name}[{f.block_bytes}]" if name else f"an array of {f.block_bytes} elements"
        return "bounds", f"index {f.offset} is outside {array}, by {_thread(f)}, which ends here"

    def _race(self, f: Found) -> tuple[str, str]:
        what, byte = self._memory(f)
        is_threadgroup = f.region == _ARENA
        types = self.labels.array_types if is_threadgroup else self.labels.types
        declared = types.get(f.block_slot if is_threadgroup else f.region, "")
        return "race", races.told(f, f"byte {byte} of {what}", declared, is_threadgroup, self.site)

    def _uninitialized(self, f: Found) -> tuple[str, str]:
        what, byte = self._memory(f)
        effect = "; no result depends on it" if f.harmless else ""
        return "uninitialized", (
            f"read of {f.size} bytes at byte {byte} of {what}, "
            f"which nothing has written, by {_thread(f)}{effect}"
        )

    def _barrier(self, f: Found) -> tuple[str, str]:
        waiting = f"{f.size} of {f.offset} threads of threadgroup {f.group} wait here"
        if f.other_site:
            return "divergence", f"{waiting}, others at {self._line(f.other_site)}"
        return "divergence", f"{waiting}, thread {f.other_thread} has returned"

    def _simd(self, f: Found) -> tuple[str, str]:
        return "simd_divergence", (
            f"only {f.size} of {f.offset} live lanes of a simdgroup reach this operation together; "
            f"thread {f.other_thread} is at {self._line(f.other_site)} (threadgroup {f.group})"
        )

    def _lane(self, f: Found) -> tuple[str, str]:
        if 0 <= f.offset < 32:
            return "lane", f"{_thread(f)} reads lane {f.offset}, which takes no part"
        if f.offset < 0:
            return "lane", f"{_thread(f)} reads a lane outside its group of lanes"
        return "lane", f"{_thread(f)} reads lane {f.offset}, but lanes are 0 to 31"

    def _schedule(self, f: Found) -> tuple[str, str]:
        return "schedule", (
            f"byte {f.offset} of {self._memory(f)[0]} differs when threads run in "
            f"{_ORDERS[f.size]} order"
        )


def _indexed(line: str, column: int) -> str:
    """The array that a line indexes at `column`, where it is or is assigned to."""
    outer, end = "", 0
    for match in _INDEXED.finditer(line):
        if match.start() > column:
            break
        if match.start() == column:
            return match[1]
        if match.start() >= end:
            outer, end = match[1], match.end()
            depth = 1
            while end < len(line) and depth:
                depth += {"[": 1, "]": -1}.get(line[end], 0)
                end += 1
    return outer


def _thread(f: Found) -> str:
    return f"thread {f.thread} of threadgroup {f.group}"


def stopped(
    kernel: str,
    session: Session,
    sites: list[Site],
    place: tuple[str, int],
    hung: bool,
    timeout: float,
) -> Finding:
    """The finding for a worker that had to be stopped or died."""
    site = sites[session.site] if session.site < len(sites) else sites[0]
    where = (site.file, site.line) if site.line else place
    message = (
        f"no progress for {timeout:g} s in threadgroup {session.group}: a loop that never ends, "
        "or a wait for another thread"
        if hung
        else f"the kernel ended its process in threadgroup {session.group}"
    )
    return Finding("hang" if hung else "crash", message, kernel, *where, (), session.group)


def limit_findings(kernel: str, session: Session, place: tuple[str, int]) -> list[Finding]:
    used = session.threadgroup_bytes
    if used <= MAX_THREADGROUP_BYTES:
        return []
    message = f"threadgroup memory is at most {MAX_THREADGROUP_BYTES} bytes, the kernel uses {used}"
    return [Finding("limit", message, kernel, *place)]


def counters(session: Session, rows: list[Row], encoded: Encoded, groups: int) -> dict[str, Any]:
    """What the kernel moved, as plain numbers."""
    parameters = {r.index: r for r in rows if not r.is_threadgroup}
    fields = ("read", "written", "distinct_read", "distinct_written", "fetched")
    spaces = {name: dict.fromkeys(fields, 0) for name in ("device", "constant")}
    buffers = {}
    for region, block in enumerate(encoded.blocks):
        count = session.counts[region]
        values = {name: int(getattr(count, name)) for name in fields}
        row = parameters.get(block.index)
        buffers[row.name if row else str(block.index)] = values
        space = spaces["constant" if row and row.is_constant else "device"]
        for name, value in values.items():
            space[name] += value
    arena = session.counts[_ARENA]
    accesses = session.sampled_accesses
    return {
        **spaces,
        "threadgroup": {"read": int(arena.read), "written": int(arena.written)},
        "buffers": buffers,
        "threadgroup_bytes": int(session.threadgroup_bytes),
        "threads": int(session.threads),
        "barriers_per_thread": int(session.barriers) / max(1, groups),
        "simd_operations": int(session.collectives),
        "atomics": int(session.atomics),
        "lines_per_simdgroup_access": session.sampled_lines / accesses if accesses else 0.0,
    }
