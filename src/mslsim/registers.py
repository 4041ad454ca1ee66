# SPDX-License-Identifier: MIT
"""Arrays of a thread that cannot be in registers.

A GPU has no registers to index: an array is in registers only where every index is a constant once
loops are unrolled. Any other one is in device memory, at the cost of a load for each use.
"""

from __future__ import annotations

import re
from pathlib import Path

from .build import Builder
from .frontend.parse import Parsed
from .frontend.rewrite import symbol
from .report import Finding

_FUNCTION = re.compile(r"^define .*@\"?msl_(?:thread|group)_([\w.$]+)\"?\(")
_ARRAY = re.compile(r"^  (%[\w.\"]+) = alloca (\[.*\]),")
# of the machine, which takes their address
_MATRIX = "simdgroup_matrix"
_DECLARED = re.compile(r"dbg[._]declare\((?:metadata )?ptr (%[\w.\"]+), (?:metadata )?!(\d+)")
_VARIABLE = re.compile(r"^!(\d+) = .*DILocalVariable\(.*file: !(\d+), line: (\d+)")
_FILE = re.compile(r"^!(\d+) = .*DIFile\(filename: \"([^\"]+)\", directory: \"([^\"]*)\"")


def arrays_in_memory(builder: Builder) -> list[Finding]:
    """A finding for each kernel and array."""

    def look(precompiled: Path) -> list[Finding]:
        return _arrays(builder.parsed(), builder.intermediate("whole", precompiled).splitlines())

    key = builder.tools.recipe(builder.checked, "whole") + Path(__file__).read_text()
    return builder.findings("registers", key, look)


def _arrays(parsed: Parsed, ir: list[str]) -> list[Finding]:
    kernels = {symbol(k.name): k.name for k in parsed.kernels}
    # the compiler splits the names of files that share folders with its own
    named = parsed.files
    files = {
        m[1]: m[2] if m[2] in named else f"{m[3]}/{m[2]}" for line in ir if (m := _FILE.match(line))
    }
    variables = {m[1]: m for line in ir if (m := _VARIABLE.match(line))}
    # a kernel without barriers is there twice: for one thread, and for all of a group
    found: dict[Finding, None] = {}
    kernel, arrays = "", dict[str, tuple[str, int]]()
    for line in ir:
        if line.startswith("define"):
            function = _FUNCTION.match(line)
            kernel = kernels.get(function[1], "") if function else ""
        array, declared = _ARRAY.match(line), _DECLARED.search(line)
        if array and kernel and _MATRIX not in array[2]:
            arrays[array[1]] = ("", 0)
        elif declared and declared[1] in arrays and (known := variables.get(declared[2])):
            arrays[declared[1]] = (files.get(known[2], ""), int(known[3]))
        elif line.startswith("}"):
            found |= dict.fromkeys(_finding(kernel, n, place) for n, place in arrays.items())
            arrays.clear()
    return list(found)


def _finding(kernel: str, array: str, place: tuple[str, int]) -> Finding:
    # the compiler numbers what it inlines and splits: %kept.i.sroa.4
    name = array.strip('%"').partition(".")[0]
    message = f"{name} is not in registers: an index is no constant; unroll its loop"
    return Finding("registers", message, kernel, *place)
