# SPDX-License-Identifier: MIT
"""Which instructions of a kernel a GPU would issue, by line, and counters of how often.

Instructions are those of the optimised intermediate code, in the classes of `costs.toml`. What
costs nothing on a GPU is left out: computing the thread's position, uniform values, parts of
vectors, signs, a comparison beside its choice, and an index of 32 bits in an address.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from .classes import ACCESS_BYTES, Code, classify, inside_simdgroup, pointer_of, type_of
from .frontend.rewrite import symbol
from .sites import Locations
from .ssa import Instruction, read
from .text.kernels import Kernel

MAX_THREADS = 1024
_BYTES = {"i1": 1, "i8": 1, "i16": 2, "half": 2, "bfloat": 2, "i64": 8, "ptr": 8, "double": 8}
# A pointer that a constant number of bytes is added to.
_STEP = re.compile(r"i8, ptr (%[\w.$-]+), i64 (-?\d+)$")
_TERMINATOR = re.compile(r"^  (?:br|ret|switch|unreachable)\b")

Chain = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Counted:
    """Instructions of one class at one place of a block. `place` is the line, then the lines it
    was inlined at, innermost first."""

    place: Chain
    name: str
    count: int


def count_blocks(
    text: str, kernel: Kernel, sources: Collection[str], own: str
) -> tuple[str, list[list[Counted]]]:
    """IR whose blocks count how often each thread of a group was there, in `msl_counts_<kernel>`,
    and the instructions of each block."""
    lines = text.split("\n")
    known = Locations(lines, sources, own)
    (function,) = read(lines, f"msl_thread_{symbol(kernel.name)}")
    code = Code(kernel, function)
    blocks = [_counted(b.instructions, code, known) for b in function.blocks.values()]
    table = f"@msl_counts_{symbol(kernel.name)}"
    head = f"@{function.name}("
    start = next(i for i, line in enumerate(lines) if line.startswith("define") and head in line)
    end = lines.index("}", start)
    ends = [at for at in range(start, end) if _TERMINATOR.match(lines[at])]
    for number, at in reversed(list(zip(range(len(blocks)), ends, strict=True))):
        lines[at:at] = [
            f"  %msl.row.{number} = zext i32 {function.parameters[2]} to i64",
            f"  %msl.at.{number} = getelementptr [{MAX_THREADS} x i64], ptr {table}, "
            f"i64 {number}, i64 %msl.row.{number}",
            f"  %msl.old.{number} = load i64, ptr %msl.at.{number}",
            f"  %msl.new.{number} = add i64 %msl.old.{number}, 1",
            f"  store i64 %msl.new.{number}, ptr %msl.at.{number}",
        ]
    lines.append(f"{table} = global [{len(blocks)} x [{MAX_THREADS} x i64]] zeroinitializer")
    return "\n".join(lines), blocks


Accesses = dict[tuple[str, str, int, str], list[tuple[int, int, Chain]]]


def _counted(instructions: list[Instruction], code: Code, known: Locations) -> list[Counted]:
    found: Counter[tuple[Chain, str]] = Counter()
    accesses: Accesses = {}
    place: Chain | None = None
    for i in instructions:
        chain = known.chain(i.debug)
        # Outermost is the function that starts a thread; where nothing is known, it is the line
        # of the instruction before.
        if chain and chain[0][1]:
            place = tuple((file, line) for file, line, _ in chain[:-1])
        if not place or code.is_shared(i):
            continue
        if not i.callee.startswith("msl_") and inside_simdgroup(i, code, known):
            continue
        name, count = classify(i, code)
        if name and i.opcode in ("load", "store"):
            _join(i, place, name, code, accesses)
        elif name:
            found[place, name] += count
    for (_, _, _, name), parts in accesses.items():
        for where, bytes_ in _runs(parts):
            found[where, name] += -(-bytes_ // ACCESS_BYTES)
    return [Counted(place, name, count) for (place, name), count in found.items()]


def _join(i: Instruction, place: Chain, name: str, code: Code, accesses: Accesses) -> None:
    """Notes an access by what its address is counted from."""
    lanes, element = type_of(i)
    size = lanes * _BYTES.get(element, 4)
    pointer, offset = pointer_of(i), 0
    while (maker := code.makers.get(pointer)) and (step := _STEP.match(maker.text)):
        pointer, offset = step[1], offset + int(step[2])
    accesses.setdefault((i.opcode, pointer, size, name), []).append((offset, size, place))


def _runs(parts: list[tuple[int, int, Chain]]) -> list[tuple[Chain, int]]:
    """Accesses side by side are one, as a compiler makes them: the place of the first, and the
    bytes of all."""
    runs: list[tuple[Chain, int]] = []
    end = None
    for offset, size, place in sorted(parts):
        if offset == end and runs[-1][1] + size <= ACCESS_BYTES:
            runs[-1] = (runs[-1][0], runs[-1][1] + size)
        else:
            runs.append((place, size))
        end = offset + size
    return runs
