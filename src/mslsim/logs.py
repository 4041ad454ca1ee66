# SPDX-License-Identifier: MIT
"""What kernels give to os_log."""

from __future__ import annotations

import ctypes
import sys

from .sites import Site
from .worker import Log

_LEVELS = {1: "info: ", 2: "debug: ", 16: "error: ", 17: "fault: "}


def taken(log: Log, sites: list[Site]) -> list[str]:
    """The lines of a launch, which are also written to stderr; the machine forgets them."""
    lines = []
    text = ctypes.string_at(ctypes.addressof(log) + Log.text.offset, log.used)
    for record in text.split(b"\x1e")[:-1]:
        thread, group, number, level, said = record.decode(errors="replace").split(" ", 4)
        site = sites[int(number)] if int(number) < len(sites) else sites[0]
        where = f"{site.file}:{site.line}: " if site.line else ""
        who = f"thread {thread} of threadgroup {group}"
        lines.append(f"{where}{who}: {_LEVELS.get(int(level), '')}{said}")
    if log.lost:
        lines.append(f"{log.lost} more lines are lost: the log of a launch holds 64 KiB")
    log.used = log.lost = 0
    for line in lines:
        print(line, file=sys.stderr)
    return lines
