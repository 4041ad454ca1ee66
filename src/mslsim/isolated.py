# SPDX-License-Identifier: MIT
"""Runs a kernel with checks, in processes of its own that live from run to run."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import logs
from .arguments import Encoded, Row, copy_memory, same_memory
from .build import Build
from .findings import Labels, counters, describe, limit_findings, stopped
from .frontend.rewrite import symbol
from .native import ORDERS
from .process import Died, Worker
from .report import Finding, Report
from .steps import EVENT_BYTES, Step, Traced, read_steps
from .steps import ROOM as TRACE_ROOM
from .worker import BUFFERS, MAX_IGNORED, SESSION_BYTES

_BITS = {
    "bounds": 1,
    "race": 2,
    "uninitialized": 4,
    "divergence": 8,
    "counters": 16,
    "schedule": 32,
    "trace": 64,
}
_PAGE = 65536
TRACE_BYTES = (TRACE_ROOM * EVENT_BYTES + _PAGE - 1) // _PAGE * _PAGE
# kThreadgroupSlots of abi.h: arguments in threadgroup memory come after the declared arrays.
_SLOTS = 256
# From this many threads on, schedules are compared in a second process at the same time.
_TWO_PROCESSES_FROM = 65536

lock = threading.Lock()
_workers: dict[tuple[int, int], Worker] = {}


def worker(index: int = 0) -> Worker:
    """A worker of this process; a fork gets its own."""
    key = (os.getpid(), index)
    if key not in _workers:
        _workers[key] = Worker()
        atexit.register(_workers[key].close)
    return _workers[key]


@dataclass(slots=True)
class Job:
    """A launch to be checked."""

    kernel: str
    build: Build
    rows: list[Row]
    encoded: Encoded
    threads: tuple[int, int, int]
    group: tuple[int, int, int]
    threadgroup_memory: dict[int, int]
    order: str
    checks: frozenset[str]
    timeout: float
    place: tuple[str, int]
    line_text: Callable[[str, int], str]
    without_barrier_at: tuple[str, int] | None = None
    traced: Traced | None = None

    @property
    def groups(self) -> int:
        count = 1
        for size, step in zip(self.threads, self.group, strict=True):
            count *= -(-size // step)
        return count

    def layout(self) -> tuple[list[int], list[int], int]:
        """Where the shared file has each block, and what is known of its bytes; and the end."""
        end, places, marks = SESSION_BYTES, [], []
        for block in self.encoded.blocks:
            room = (block.size + _PAGE - 1) // _PAGE * _PAGE
            places.append(end)
            end += room
            is_marked = block.written is not None and room > 0
            marks.append(end if is_marked else 0)
            end += room if is_marked else 0
        return places, marks, end

    def start(self, w: Worker, checks: frozenset[str], others: bool = False) -> None:
        """Copies the buffers and sets the worker to work, with its own order or all `others`."""
        places, marks, end = self.layout()
        w.reserve(end + (TRACE_BYTES if self.traced else 0))
        session = w.session
        ctypes.memset(ctypes.addressof(session), 0, ctypes.sizeof(session))
        if self.traced:
            session.trace_offset, session.trace_room = end, TRACE_ROOM
            session.trace_group, session.trace_thread = self.traced.group, self.traced.thread
        session.checks = sum(bit for name, bit in _BITS.items() if name in checks)
        session.order = ORDERS[self.order]
        ignored = self._ignored_sites()
        session.ignored_count = len(ignored)
        session.ignored[: len(ignored)] = ignored
        constant = {r.index for r in self.rows if r.read_only}
        buffers = []
        for region, block in enumerate(self.encoded.blocks):
            info = session.regions[region]
            info.file_offset, info.bytes, info.bound = places[region], block.size, 1
            info.written_offset = marks[region]
            using = [b for b in self.encoded.bound if b.block is block]
            pointed = any(p.target is block for p in self.encoded.pointers)
            info.read_only = not pointed and all(b.index in constant for b in using)
            buffers += [(b.index, region, b.offset) for b in using]
            copy_memory(w.address() + places[region], block.address, block.size)
            if marks[region] and block.written is not None:
                known = block.written.ctypes.data
                copy_memory(w.address() + marks[region], known, block.size)
        # A buffer that is not bound has an empty slot, past those in use.
        free = min(len(self.encoded.blocks), BUFFERS - 1)
        bound = {b.index for b in self.encoded.bound}
        buffers += [
            (r.index, free, 0) for r in self.rows if not r.is_threadgroup and r.index not in bound
        ]
        order = next(o for o in ORDERS if o != self.order) if others else self.order
        w.send(self._request(buffers) | {"order": ORDERS[order]})

    def _ignored_sites(self) -> list[int]:
        """Every place that the line's code was inlined to."""
        place = self.without_barrier_at
        sites = [i for i, s in enumerate(self.build.sites) if (s.file, s.line) == place]
        if len(sites) > MAX_IGNORED:
            raise ValueError(f"{self.kernel}: {place} stands for over {MAX_IGNORED} barriers")
        return sites

    def _request(self, buffers: list[tuple[int, int, int]]) -> dict[str, Any]:
        return {
            "action": "run",
            "library": str(self.build.library),
            "symbol": f"msl_thread_{symbol(self.kernel)}",
            "sites": len(self.build.sites),
            "buffers": buffers,
            "pointers": self._pointers(),
            "threadgroup_memory": sorted(self.threadgroup_memory.items()),
            "threads": self.threads,
            "group_size": self.group,
            "synchronised": int(self.kernel in self.build.synchronised),
        }

    def _pointers(self) -> list[tuple[int, int, int, int]]:
        """Region and offset of each pointer, and of what it points to."""
        region = {id(block): i for i, block in enumerate(self.encoded.blocks)}
        return [
            (region[id(p.block)], p.at, region[id(p.target)], p.offset)
            for p in self.encoded.pointers
        ]

    def finish(self, w: Worker) -> list[Finding]:
        """Waits for the worker and reads what it found."""
        findings = []
        try:
            if w.wait(self.timeout) != "done":
                raise MemoryError(f"mslsim: {self.kernel}: the buffers do not fit into memory")
        except Died as death:
            findings.append(
                stopped(
                    self.kernel, w.session, self.build.sites, self.place, death.hung, self.timeout
                )
            )
        return findings + describe(
            self.kernel, w.session, self.build.sites, self._labels(), self.place, self.line_text
        )

    def _labels(self) -> Labels:
        shared = {_SLOTS + r.index: r for r in self.rows if r.is_threadgroup}
        known = self.build.threadgroup_arrays
        types = {r.index: r.declared for r in self.rows if not r.is_threadgroup}
        return Labels(
            _names(self.rows, self.encoded),
            {i: types.get(b.index, "") for i, b in enumerate(self.encoded.blocks)},
            _elements(self.rows, self.encoded),
            {slot: n for slot, (n, _) in known.items()} | {s: r.name for s, r in shared.items()},
            {slot: t for slot, (_, t) in known.items()}
            | {s: r.declared for s, r in shared.items()},
        )

    def steps(self, w: Worker) -> list[Step]:
        """What the traced thread did."""
        session = w.session
        address = w.address() + session.trace_offset
        return read_steps(address, session.trace_count, self.build.sites, self._labels())

    def wrote_the_same(self, w: Worker, other: Worker) -> bool:
        """Whether two workers have the same results."""
        return all(
            w.session.regions[region].read_only
            or same_memory(w.address() + place, other.address() + place, block.size)
            for region, (block, place) in enumerate(
                zip(self.encoded.blocks, self.layout()[0], strict=True)
            )
        )

    def copy_back(self, w: Worker) -> None:
        places, marks, _ = self.layout()
        for region, block in enumerate(self.encoded.blocks):
            if not w.session.regions[region].read_only:
                copy_memory(block.address, w.address() + places[region], block.size)
            if marks[region] and block.written is not None:
                known = block.written.ctypes.data
                copy_memory(known, w.address() + marks[region], block.size)


def run(job: Job) -> Report:
    """Runs the grid under the given checks; the caller's memory is changed as the kernel did."""
    size = job.threads[0] * job.threads[1] * job.threads[2]
    apart = "schedule" in job.checks and size >= _TWO_PROCESSES_FROM
    with lock:
        w = worker()
        try:
            job.start(w, job.checks - {"schedule"} if apart else job.checks)
            if apart:
                job.start(worker(1), frozenset({"schedule"}), others=True)
            findings = job.finish(w)
            if apart and any(not f.is_note for f in findings):
                worker(1).stop()
            elif apart:
                differing = job.finish(worker(1))
                if not (differing or job.wrote_the_same(w, worker(1))):
                    # sums of floats may differ: one process weighs all orders
                    job.start(worker(1), frozenset({"schedule"}))
                    differing = job.finish(worker(1))
                findings += differing
        except BaseException:
            # neither may go on with a launch that nobody waits for
            for index in range(1 + apart):
                worker(index).stop()
            raise
        if "limits" in job.checks:
            findings += limit_findings(job.kernel, w.session, job.place)
        if "uninitialized" in job.checks:
            findings += [
                Finding(f.kind, f.message, job.kernel, f.file, f.line) for f in job.build.findings
            ]
        said = logs.taken(w.session.log, job.build.sites)
        counted = (
            counters(w.session, job.rows, job.encoded, job.groups)
            if "counters" in job.checks
            else {}
        )
        steps = job.steps(w) if job.traced else []
        job.copy_back(w)
    harm, notes = ([f for f in findings if f.is_note == note] for note in (False, True))
    return Report(job.kernel, harm, counted, notes, said, steps)


def _names(rows: list[Row], encoded: Encoded) -> dict[int, str]:
    """What to call each region: the parameter it was first passed for."""
    parameters = {r.index: r.label for r in rows if not r.is_threadgroup}
    return {
        region: block.label or parameters.get(block.index, f"? [[buffer({block.index})]]")
        for region, block in enumerate(encoded.blocks)
    }


def _elements(rows: list[Row], encoded: Encoded) -> dict[int, int]:
    """Bytes of an element, for the regions that one pointer has from their start on."""
    sizes = {r.index: r.size for r in rows if not r.is_threadgroup and not r.is_reference}
    starts: dict[int, set[int]] = {}
    for region, block in enumerate(encoded.blocks):
        for bound in (b for b in encoded.bound if b.block is block):
            starts.setdefault(region, set()).add(0 if bound.offset else sizes.get(bound.index, 0))
    return {region: size for region, (size, *others) in starts.items() if size and not others}
