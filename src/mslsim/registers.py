# SPDX-License-Identifier: MIT
"""Arrays of a thread that cannot be in registers.

A GPU has no registers to index: an array is in registers only where every index is a constant once
loops are unrolled. Any other one is in device memory, at the cost of a load for each use.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

_FUNCTION = re.compile(r"^define .*@\"?(msl_thread_[\w.$]+)\"?\(")
_ARRAY = re.compile(r"^  (%[\w.\"]+) = alloca (\[.*\]),")
# of the machine, which takes their address
_MATRIX = "simdgroup_matrix"
_DECLARED = re.compile(r"dbg[._]declare\((?:metadata )?ptr (%[\w.\"]+), (?:metadata )?!(\d+)")
_VARIABLE = re.compile(r"^!(\d+) = .*DILocalVariable\(.*file: !(\d+), line: (\d+)")
_FILE = re.compile(r"^!(\d+) = .*DIFile\(filename: \"([^\"]+)\", directory: \"([^\"]*)\"")


class Array(NamedTuple):
    """An array in memory, and where it is declared."""

    name: str
    file: str
    line: int


def arrays_in_memory(lines: list[str], sources: Collection[str]) -> dict[str, tuple[Array, ...]]:
    """The arrays of each function of LLVM IR. `sources` are the files that the text came from, by
    the names they go by."""
    # the compiler splits the names of files that share folders with its own
    files = {
        m[1]: m[2] if m[2] in sources else f"{m[3]}/{m[2]}"
        for line in lines
        if (m := _FILE.match(line))
    }
    variables = {m[1]: m for line in lines if (m := _VARIABLE.match(line))}
    found: dict[str, tuple[Array, ...]] = {}
    function, arrays = "", dict[str, Array]()
    for line in lines:
        if line.startswith("define"):
            head = _FUNCTION.match(line)
            function = head[1] if head else ""
        array, declared = _ARRAY.match(line), _DECLARED.search(line)
        if array and function and _MATRIX not in array[2]:
            # the compiler numbers what it inlines and splits: %kept.i.sroa.4
            arrays[array[1]] = Array(array[1].strip('%"').partition(".")[0], "", 0)
        elif declared and declared[1] in arrays and (known := variables.get(declared[2])):
            place = (files.get(known[2], ""), int(known[3]))
            arrays[declared[1]] = Array(arrays[declared[1]].name, *place)
        elif line.startswith("}") and function:
            found[function] = tuple(dict.fromkeys(arrays.values()))
            function = ""
            arrays.clear()
    return found
