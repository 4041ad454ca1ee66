# SPDX-License-Identifier: MIT
"""Runs a kernel without checks, in this process, straight on the caller's memory."""

from __future__ import annotations

import ctypes
import os
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

from . import logs
from .arguments import Encoded, Row
from .build import Build, machine_library
from .frontend.rewrite import symbol
from .worker import Launch, Log

ORDERS = {"ascending": 0, "descending": 1, "random": 2}


_lock = threading.Lock()


@lru_cache(maxsize=1)
def _machine() -> ctypes.CDLL:
    library = ctypes.CDLL(str(machine_library(checked=False)), mode=ctypes.RTLD_GLOBAL)
    library.msl_run.argtypes = [ctypes.POINTER(Launch)]
    library.msl_run.restype = ctypes.c_int
    library.msl_launch_log.restype = ctypes.POINTER(Log)
    return library


@lru_cache(maxsize=4096)
def open_library(path: Path) -> ctypes.CDLL:
    _machine()
    return ctypes.CDLL(str(path))


def read_table(library: Any, kernel: str, names: list[tuple[str, str]]) -> list[Row]:
    """The kernel's own description of its buffers, as the compiler saw them."""
    table = (ctypes.c_int * 6 * (len(names) + 1)).in_dll(library, f"msl_table_{symbol(kernel)}")
    return [Row.read(name, list(r)) for name, r in zip(names, table, strict=False)]


def address_of(library: Any, name: str) -> int | None:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value


def run(
    build: Build,
    kernel: str,
    encoded: Encoded,
    threads: tuple[int, int, int],
    group: tuple[int, int, int],
    threadgroup_memory: dict[int, int],
    order: str,
    workers: int | None = None,
) -> tuple[Launch, list[str]]:
    """Runs the grid on all cores, or on `workers` of them; returns the launch with its results, and
    what was logged."""
    library = open_library(build.library)
    launch = Launch()
    if kernel in build.whole_groups:
        launch.group = address_of(library, f"msl_group_{symbol(kernel)}")
    else:
        launch.thread = address_of(library, f"msl_thread_{symbol(kernel)}")
    for bound in encoded.bound:
        launch.buffer[bound.index] = bound.block.address + bound.offset
    for p in encoded.pointers:
        ctypes.c_uint64.from_address(p.block.address + p.at).value = p.target.address + p.offset
    for index, size in threadgroup_memory.items():
        launch.threadgroup_bytes[index] = size
    launch.threads[:] = threads
    launch.group_size[:] = group
    launch.order, launch.seed = ORDERS[order], 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4
    launch.workers = workers or cores
    launch.synchronised = 1
    with _lock:
        if _machine().msl_run(ctypes.byref(launch)):
            raise MemoryError("mslsim: no memory for the stacks of a threadgroup")
        log = _machine().msl_launch_log().contents
        return launch, logs.taken(log, build.sites) if log.used else []
