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
from dataclasses import dataclass

from .compiler import PACKAGE

_SITED = re.compile(
    r"@(__tsan_(?:unaligned_)?(?:read|write)\d+|__tsan_mem(?:cpy|move|set)"
    r"|__ubsan_handle_\w+|msl_threadgroup_barrier|msl_collective|msl_fence|msl_atomic)\("
)
_LOCATION = re.compile(r"^!(\d+) = (?:distinct )?!DILocation\((.*)\)$")
_SCOPE = re.compile(
    r"^!(\d+) = (?:distinct )?!(?:DISubprogram|DILexicalBlock|DILexicalBlockFile)\((.*)\)$"
)
_FILE = re.compile(
    r'^!(\d+) = !DIFile\(filename: "((?:[^"\\]|\\.)*)"(?:, directory: "((?:[^"\\]|\\.)*)")?'
)
_OWN = str(PACKAGE)
_DEBUG = re.compile(r"!dbg !(\d+)")


@dataclass(frozen=True, slots=True)
class Site:
    """A source position; `calls` are the lines it was inlined at, innermost first."""

    file: str
    line: int
    column: int
    calls: tuple[tuple[str, int], ...] = ()


def _full_path(name: str, folder: str) -> str:
    """The compiler may shorten paths by its own folder; a source that is no file keeps its name."""
    path = os.path.normpath(os.path.join(folder, name))
    return path if os.path.isfile(path) else name


def _fields(text: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+): (!?[\w]+)", text))


class _Locations:
    """The debug locations of a module."""

    def __init__(self, lines: list[str]) -> None:
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
                self.files["!" + match[1]] = _full_path(match[2], match[3] or "")

    def chain(self, number: str) -> tuple[tuple[str, int, int], ...]:
        """(file, line, column) of a location and of what it was inlined at, innermost first."""
        frames = []
        location = self.locations.get("!" + number)
        while location:
            scope = self.scopes.get(location.get("scope", ""), {})
            file = self.files.get(scope.get("file", ""), "?")
            # Code of the machine's headers counts as part of the line that calls it.
            if not file.startswith(_OWN):
                frames.append((file, int(location.get("line", 0)), int(location.get("column", 0))))
            location = self.locations.get(location.get("inlinedAt", ""))
        return tuple(frames)


def add_sites(text: str) -> tuple[str, list[Site]]:
    """IR with site numbers in place, and the table they index. Site 0 is an unknown position."""
    lines = text.split("\n")
    known = _Locations(lines)
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
            lines[at] = f"{line[:end]}, i32{line[end:]}"
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
        lines[at] = f"{line[:end]}, i32 {site}{line[end:]}"
    sites = [Site("?", 0, 0)]
    sites += [Site(*chain[0], tuple((f, n) for f, n, _ in chain[1:])) for chain in ordered]
    return "\n".join(lines), sites


def _source_order(chain: tuple[tuple[str, int, int], ...]) -> list[tuple[int, int]]:
    return [(line, column) for _, line, column in reversed(chain)]


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
