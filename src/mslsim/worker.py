# SPDX-License-Identifier: MIT
"""The process that runs checked kernels, so that a crash or a hang stays in it.

It is started as a script and imports nothing but the standard library, and `sandbox` beside it. It
reads one request a line from stdin, maps the buffers from a file that it shares with its parent,
runs, and answers with a line. The results are in the shared file, where the parent finds them even
if this process dies.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
from typing import Any

BUFFERS = 31
REGIONS = BUFFERS + 1
MAX_FOUND = 64
MAX_IGNORED = 64


class Launch(ctypes.Structure):
    """msl::Launch of machine.h."""

    _fields_ = (
        ("thread", ctypes.c_void_p),
        ("group", ctypes.c_void_p),
        ("buffer", ctypes.c_void_p * BUFFERS),
        ("threadgroup", ctypes.c_void_p * BUFFERS),
        ("threads", ctypes.c_uint32 * 3),
        ("group_size", ctypes.c_uint32 * 3),
        ("threadgroup_bytes", ctypes.c_uint32 * BUFFERS),
        ("order", ctypes.c_int32),
        ("seed", ctypes.c_uint32),
        ("workers", ctypes.c_uint32),
        ("synchronised", ctypes.c_int32),
        ("static_threadgroup_bytes", ctypes.c_uint32),
        ("failed", ctypes.c_uint32),
    )


class RegionInfo(ctypes.Structure):
    """msl::RegionInfo of memory.h."""

    _fields_ = (
        ("file_offset", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("written_offset", ctypes.c_uint64),
        ("bound", ctypes.c_int32),
        ("read_only", ctypes.c_int32),
    )


class Found(ctypes.Structure):
    """msl::Found of memory.h."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("site", ctypes.c_uint32),
        ("other_site", ctypes.c_uint32),
        ("thread", ctypes.c_uint32),
        ("other_thread", ctypes.c_uint32),
        ("group", ctypes.c_uint32),
        ("other_group", ctypes.c_uint32),
        ("region", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("writes", ctypes.c_uint32),
        ("offset", ctypes.c_int64),
        ("block_offset", ctypes.c_uint64),
        ("block_bytes", ctypes.c_uint64),
        ("block_slot", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("other_value", ctypes.c_uint64),
        ("barrier", ctypes.c_uint32),
        ("barrier_site", ctypes.c_uint32),
        ("barrier_flags", ctypes.c_uint32),
        ("simd_site", ctypes.c_uint32),
        ("harmless", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    )


class RegionCounts(ctypes.Structure):
    """msl::RegionCounts of memory.h."""

    _fields_ = (
        ("read", ctypes.c_uint64),
        ("written", ctypes.c_uint64),
        ("distinct_read", ctypes.c_uint64),
        ("distinct_written", ctypes.c_uint64),
        ("fetched", ctypes.c_uint64),
    )


class TraceEvent(ctypes.Structure):
    """msl::TraceEvent of memory.h."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("site", ctypes.c_uint32),
        ("region", ctypes.c_uint32),
        ("slot", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("atomic", ctypes.c_uint32),
        ("offset", ctypes.c_int64),
        ("value", ctypes.c_ubyte * 16),
        ("address", ctypes.c_uint64),
    )


class Log(ctypes.Structure):
    """msl::Log of machine.h."""

    _fields_ = (
        ("used", ctypes.c_uint32),
        ("lost", ctypes.c_uint32),
        ("text", ctypes.c_char * (1 << 16)),
    )


class Session(ctypes.Structure):
    """msl::Session of memory.h."""

    _fields_ = (
        ("checks", ctypes.c_uint32),
        ("order", ctypes.c_int32),
        ("ignored_count", ctypes.c_uint32),
        ("ignored", ctypes.c_uint32 * MAX_IGNORED),
        ("regions", RegionInfo * REGIONS),
        ("steps", ctypes.c_uint64),
        ("site", ctypes.c_uint32),
        ("thread", ctypes.c_uint32),
        ("group", ctypes.c_uint32),
        ("found_count", ctypes.c_uint32),
        ("found", Found * MAX_FOUND),
        ("counts", RegionCounts * REGIONS),
        ("threads", ctypes.c_uint64),
        ("barriers", ctypes.c_uint64),
        ("collectives", ctypes.c_uint64),
        ("atomics", ctypes.c_uint64),
        ("sampled_accesses", ctypes.c_uint64),
        ("sampled_lines", ctypes.c_uint64),
        ("threadgroup_bytes", ctypes.c_uint64),
        ("trace_offset", ctypes.c_uint64),
        ("trace_room", ctypes.c_uint32),
        ("trace_group", ctypes.c_uint32),
        ("trace_thread", ctypes.c_uint32),
        ("trace_count", ctypes.c_uint32),
        ("trace_lost", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("log", Log),
    )


# Room for the session at the start of the shared file.
SESSION_BYTES = (ctypes.sizeof(Session) + 65535) // 65536 * 65536


class Server:
    """Answers requests with the machine at `machine` and the shared file at `shared`."""

    def __init__(self, machine: str, shared: str) -> None:
        self.machine = ctypes.CDLL(machine, mode=ctypes.RTLD_GLOBAL)
        self.machine.msl_region.restype = ctypes.c_void_p
        self.file = open(shared, "r+b", buffering=0)  # noqa: SIM115
        self.map = mmap.mmap(self.file.fileno(), SESSION_BYTES)
        self.session = Session.from_buffer(self.map)
        self.libraries: dict[str, ctypes.CDLL] = {}
        self.given_up: list[str] = []

    def library(self, path: str) -> ctypes.CDLL:
        if path not in self.libraries:
            self.libraries[path] = ctypes.CDLL(path)
        return self.libraries[path]

    def answer(self, request: dict[str, Any]) -> object:
        if request["action"] == "isolation":
            return self.given_up
        library = self.library(request["library"])
        if request["action"] == "table":
            rows = (ctypes.c_int * 6 * request["rows"]).in_dll(library, request["symbol"])
            return [list(r) for r in rows]
        return self.run(library, request)

    def run(self, library: ctypes.CDLL, request: dict[str, Any]) -> object:
        if self.machine.msl_map(
            ctypes.byref(self.session), self.file.fileno(), ctypes.c_uint32(request["sites"])
        ):
            return "no memory"
        launch = Launch()
        function = getattr(library, request["symbol"])
        launch.thread = ctypes.cast(function, ctypes.c_void_p).value
        for i in range(BUFFERS):
            launch.buffer[i] = self.machine.msl_region(i)
        for index, region, offset in request["buffers"]:
            launch.buffer[index] = self.machine.msl_region(region) + offset
        for region, at, target, offset in request["pointers"]:
            place = ctypes.c_uint64.from_address(self.machine.msl_region(region) + at)
            place.value = self.machine.msl_region(target) + offset
        for index, size in request["threadgroup_memory"]:
            launch.threadgroup_bytes[index] = size
        launch.threads[:] = request["threads"]
        launch.group_size[:] = request["group_size"]
        launch.order = request["order"]
        launch.seed, launch.workers = 1, 1
        launch.synchronised = request["synchronised"]
        self.machine.msl_run_checked(ctypes.byref(launch))
        return "done"


def main() -> None:
    server = Server(sys.argv[1], sys.argv[2])
    # as a script it is in no package
    from sandbox import enter  # type: ignore[import-not-found]

    server.given_up = enter(sys.argv[3])
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps([request["number"], server.answer(request)]), flush=True)


if __name__ == "__main__":
    main()
