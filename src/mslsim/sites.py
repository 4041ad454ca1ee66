# SPDX-License-Identifier: MIT
"""Gives every watched operation in LLVM IR the number of its source position.

The instrumentation calls functions such as `__tsan_read4(address)`. Their debug locations, with the
chain of inlined calls, become a table of sites; its index is added to the call as a last argument.
Sites are numbered in source order, outermost call first, so that a smaller number is reached first
in straight-line code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass

_SITED = re.compile(
    r"@(__tsan_(?:unaligned_)?(?:read|write)\d+|__tsan_mem(?:cpy|move|set)"
    r"|__ubsan_handle_\w+|msl_threadgroup_barrier|msl_collective|msl_fence|msl_atomic"
    r"|msl_assertion_failed|msl_texture_missed|msl_log|__sanitizer_cov_trace_pc)\("
)
# What cannot be done for all threads of a group in one loop.
_BLOCKING = (
    "msl_threadgroup_barrier",
    "msl_collective",
    "msl_threadgroup_memory",
    "msl_lane",
    "msl_thread",
    "msl_discard",
    "msl_discarded",
    "msl_log",
)
_LOCATION = re.compile(r"^!(\d+) = (?:distinct )?!DILocation\((.*)\)$")
_SCOPE = re.compile(
    r"^!(\d+) = (?:distinct )?!(?:DISubprogram|DILexicalBlock|DILexicalBlockFile)\((.*)\)$"
)
_FILE = re.compile(
    r'^!(\d+) = !DIFile\(filename: "((?:[^"\\]|\\.)*)"(?:, directory: "((?:[^"\\]|\\.)*)")?'
)
_DEBUG = re.compile(r"!dbg !(\d+)")
# A thread's own memory: variables on its stack, and what the machine passes to it.
_OWN = re.compile(r"^  (%[\w.]+) = (?:alloca |getelementptr [^,]*, ptr (%[\w.]+),)")
_WATCHED = re.compile(r"@__tsan_(?:unaligned_)?(?:read|write)\d+\(ptr (?:\w+ )*(%[\w.]+)")


@dataclass(frozen=True, slots=True)
class Site:
    """A source position; `calls` are the lines it was inlined at, innermost first."""

    file: str
    line: int
    column: int
    calls: tuple[tuple[str, int], ...] = ()


def _fields(text: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+): (!?[\w]+)", text))


class Locations:
    """The debug locations of a module that came from `sources`, and from files in `own`."""

    def __init__(self, lines: list[str], sources: Collection[str], own: str) -> None:
        self.own = own
        names = {os.path.normpath(name): name for name in sources}
        self.locations: dict[str, dict[str, str]] = {}
        self.scopes: dict[str, dict[str, str]] = {}
        self.files: dict[str, str] = {}
        for line in lines:
            if not line.startswith("!"):
                continue
            if match := _LOCATION.match(line):
                self.locations["!" + match[1]] = _fields(match[2])
            elif match := _SCOPE.match(line):
                self.scopes["!" + match[1]] = _fields(match[2])
            elif match := _FILE.match(line):
                # The compiler splits the names of files that share folders with its own.
                name, full = (
                    os.path.normpath(os.path.join(f, match[2])) for f in ("", match[3] or "")
                )
                self.files["!" + match[1]] = names.get(name) or names.get(full, full)

    def chain(self, number: str) -> tuple[tuple[str, int, int], ...]:
        """(file, line, column) of a location and of what it was inlined at, innermost first."""
        frames = []
        location = self.locations.get("!" + number)
        while location:
            scope = self.scopes.get(location.get("scope", ""), {})
            file = self.files.get(scope.get("file", ""), "?")
            # Code of the machine's headers counts as part of the line that calls it.
            if not file.startswith(self.own):
                frames.append((file, int(location.get("line", 0)), int(location.get("column", 0))))
            location = self.locations.get(location.get("inlinedAt", ""))
        return tuple(frames)

    def innermost(self, number: str) -> str:
        """The file that a location itself is in, the machine's headers included."""
        scope = self.scopes.get(self.locations.get("!" + number, {}).get("scope", ""), {})
        return self.files.get(scope.get("file", ""), "")

    def place(self, number: str) -> tuple[str, int]:
        """File and line of a location; ("", 0) where it is unknown."""
        return next(((file, line) for file, line, _ in self.chain(number)), ("", 0))


def _without_own(lines: list[str]) -> None:
    """Drops the instrumentation of memory that no other thread can reach."""
    own: set[str] = set()
    for at, line in enumerate(lines):
        if line.startswith("define"):
            own = {"%0", "%1"} if " @msl_thread_" in line else set()
        elif " = alloca " in line or " = getelementptr " in line:
            match = _OWN.match(line)
            if match and (match[2] is None or match[2] in own):
                own.add(match[1])
        elif "@__tsan_" in line and (match := _WATCHED.search(line)) and match[1] in own:
            lines[at] = ""


def add_sites(text: str, sources: Collection[str], own: str) -> tuple[str, list[Site]]:
    """IR with site numbers in place, and the table they index. Site 0 is an unknown position.

    `sources` are the files the text came from, by the names they go by; what is in folder `own`
    counts as part of the lines that use it.
    """
    lines = text.split("\n")
    _without_own(lines)
    known = Locations(lines, sources, own)
    calls: list[tuple[int, int, str]] = []
    chains: dict[str, tuple[tuple[str, int, int], ...]] = {}
    for at, line in enumerate(lines):
        if "@__" not in line and "@msl_" not in line:
            continue
        match = _SITED.search(line)
        if not match:
            continue
        end = _closing(line, match.end() - 1)
        if line.startswith("declare"):
            lines[at] = f"{line[:end]}{_comma(line, end)}i32{line[end:]}"
        elif "call" in line:
            debug = _DEBUG.search(line, end)
            number = debug[1] if debug else ""
            calls.append((at, end, number))
            if number not in chains:
                chains[number] = known.chain(number)
    ordered = sorted({c for c in chains.values() if c}, key=_source_order)
    numbers = {chain: i + 1 for i, chain in enumerate(ordered)}
    for at, end, number in calls:
        site = numbers.get(chains[number], 0)
        line = lines[at]
        lines[at] = f"{line[:end]}{_comma(line, end)}i32 {site}{line[end:]}"
    sites = [Site("?", 0, 0)]
    sites += [Site(*chain[0], tuple((f, n) for f, n, _ in chain[1:])) for chain in ordered]
    return "\n".join(lines), sites


def _source_order(chain: tuple[tuple[str, int, int], ...]) -> list[tuple[int, int]]:
    return [(line, column) for _, line, column in reversed(chain)]


def _comma(line: str, end: int) -> str:
    return "" if line[end - 1] == "(" else ", "


def _closing(line: str, opening: int) -> int:
    depth = 0
    for i in range(opening, len(line)):
        if line[i] == "(":
            depth += 1
        elif line[i] == ")":
            depth -= 1
            if depth == 0:
                return i
    raise ValueError(f"unbalanced parentheses in {line!r}")


def blocking_functions(ir: str) -> set[str]:
    """Functions of the module from which a call that can block is reached."""
    calls: dict[str, set[str]] = {}
    current = ""
    for line in ir.splitlines():
        if line.startswith("define"):
            match = re.search(r"@([\w.$]+|\"[^\"]+\")\(", line)
            current = match[1] if match else ""
            calls[current] = set()
        elif "call " in line and current:
            calls[current].update(re.findall(r"@([\w.$]+)\(", line))
    blocking = set(_BLOCKING)
    changed = True
    while changed:
        more = {f for f, called in calls.items() if f not in blocking and called & blocking}
        blocking |= more
        changed = bool(more)
    return blocking
