# SPDX-License-Identifier: MIT
"""What a launch would cost an Apple GPU: bytes, issue slots by source line, time for each chip."""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from . import isolated, native
from .arguments import Encoded, Row, check_arguments, check_launch, encode, three
from .build import Build, Builder
from .compiler import PACKAGE
from .fit import Fit, fits_of
from .frontend.parse import Source
from .frontend.rewrite import symbol
from .library import DEFAULT_TIMEOUT
from .model import SIMD_WIDTH, USUAL, Chip, Estimate, Work, chip, estimate
from .report import CompileError, Finding, KernelError, LaunchError
from .slots import MAX_THREADS, Counted

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Place = tuple[str, int]
# Of a buffer in constant memory: registers hold as much for all threads together.
_SHARED_BYTES = 512


@lru_cache(maxsize=1)
def costs() -> dict[str, tuple[float, float]]:
    """Slots of each class of instructions: issue, and the unit for complex functions."""
    table = tomllib.loads((PACKAGE / "costs.toml").read_text())["class"]
    return {name: (float(entry[0]), float(entry[1])) for name, entry in table.items()}


@dataclass(slots=True)
class Profile:
    """One launch. Slots are those of a simdgroup, so the same for each of its threads.

    `lines` are the slots of each line itself, `called` those with what it calls. `moved` are device
    bytes as the simulator counts them, `needed` the distinct ones among them.
    """

    kernel: str
    threads: int
    groups: int
    group_threads: int
    slots: float
    lanes_used: float
    classes: dict[str, float]
    lines: dict[Place, float]
    called: dict[Place, float]
    requested: int
    moved: int
    needed: int
    lines_per_access: float
    barriers: float
    threadgroup_bytes: int
    fit: Fit
    work: Work

    def estimate(self, on: str | Chip) -> Estimate:
        """Its time on a chip, by name."""
        return estimate(chip(on) if isinstance(on, str) else on, self.work)

    def as_dict(self, names: Sequence[str] = USUAL) -> dict[str, Any]:
        """As plain numbers, with the times on the chips `names`."""
        plain = asdict(self)
        for name in ("lines", "called"):
            entries: dict[Place, float] = getattr(self, name)
            plain[name] = [
                {"file": file, "line": line, "slots": slots}
                for (file, line), slots in sorted(entries.items(), key=lambda e: -e[1])
            ]
        plain["fit"]["largest_group"] = self.fit.largest_group
        plain["estimates"] = [asdict(self.estimate(name)) for name in names]
        return plain


def profile(
    source: str,
    kernel: str,
    args: Sequence[Any],
    threads: Any,
    group_size: Any,
    *,
    arg_casts: Mapping[int, str] | str | None = None,
    threadgroup_memory: Mapping[int, int] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    restore: bool = False,
    **options: Any,
) -> Profile:
    """Runs one launch and counts what it does.

    `args` are changed as the kernel does, or with `restore` are as they were. The kernel is not
    checked: a wrong one has a profile, too. `options` are those of `compile_shader` that say how to
    read the source.
    """
    text = Source(source, **options)
    builder = Builder(text, checked=False)
    if builder.index.findings:
        raise CompileError(builder.index.findings)
    if kernel not in builder.index.kernels:
        raise ValueError(f"no kernel '{kernel}'; there are {sorted(builder.index.kernels)}")
    known = builder.index.kernels[kernel]
    place = (str(known["file"]), int(known["line"]))
    path, blocks = builder.counted(kernel)
    library = native.open_library(path)
    declared = [(str(p["name"]), str(p["declared"])) for p in known["parameters"]]
    rows = native.read_table(library, kernel, declared)
    encoded = encode(kernel, args, arg_casts)
    grid, group = three(threads), three(group_size)
    memory = dict(threadgroup_memory or {})
    findings = check_launch(kernel, place, grid, group, [r.index for r in rows])
    findings = findings or check_arguments(kernel, rows, encoded, place, text.strict)
    if findings:
        raise LaunchError(findings)
    before = [ctypes.string_at(b.address, b.size) for b in encoded.blocks]
    job = isolated.Job(
        kernel, Builder(text, checked=True).build(kernel, alone=True), rows, encoded, grid, group,
        memory, "ascending", frozenset({"counters"}), timeout, place, text.line,
    )  # fmt: skip
    report = isolated.run(job)
    if report.findings:
        raise KernelError(report.findings)
    _put_back(encoded, before)
    counts = _run(library, path, kernel, len(blocks), encoded, grid, group, memory, place)
    if restore:
        _put_back(encoded, before)
    fit = fits_of(builder, [kernel])[kernel]
    return _profile(kernel, grid, group, job.groups, blocks, counts, rows, fit, report.counters)


def _put_back(encoded: Encoded, before: Sequence[bytes]) -> None:
    for block, content in zip(encoded.blocks, before, strict=True):
        ctypes.memmove(block.address, content, block.size)


def _run(
    library: Any,
    path: Any,
    kernel: str,
    blocks: int,
    encoded: Encoded,
    grid: tuple[int, int, int],
    group: tuple[int, int, int],
    memory: dict[int, int],
    place: Place,
) -> Any:
    """How often each block was run: [blocks, threads of a group]."""
    table = (ctypes.c_int64 * (blocks * MAX_THREADS)).in_dll(
        library, f"msl_counts_{symbol(kernel)}"
    )
    ctypes.memset(table, 0, ctypes.sizeof(table))
    build = Build(path, [], [], set(), {kernel}, {})
    # The counters are shared, so one thread of the machine runs it all.
    launch, _ = native.run(build, kernel, encoded, grid, group, memory, "ascending", workers=1)
    if launch.failed:
        message = "a threadgroup_barrier was not reached by all threads of the group"
        raise KernelError([Finding("divergence", message, kernel, *place)])
    return np.ctypeslib.as_array(table).reshape(blocks, MAX_THREADS)


def _profile(
    kernel: str,
    grid: tuple[int, int, int],
    group: tuple[int, int, int],
    groups: int,
    blocks: Sequence[Sequence[Counted]],
    counts: Any,
    rows: Sequence[Row],
    fit: Fit,
    counters: dict[str, Any],
) -> Profile:
    # A simdgroup is at a block as often as the busiest of its lanes.
    at_block = counts.reshape(len(blocks), -1, SIMD_WIDTH).max(-1).sum(-1)
    simdgroups = max(1, int(at_block[0]))
    threads, size = int(np.prod(grid)), int(np.prod(group))
    classes: Counter[str] = Counter()
    lines: Counter[Place] = Counter()
    called: Counter[Place] = Counter()
    issue = complex_unit = in_lanes = 0.0
    products = 0
    for block, times, lanes in zip(blocks, at_block.tolist(), counts.sum(-1).tolist(), strict=True):
        for c in block:
            cost = costs()[c.name]
            slots = c.count * max(cost)
            issue += times * c.count * cost[0]
            complex_unit += times * c.count * cost[1]
            in_lanes += lanes * slots / SIMD_WIDTH
            products += times * c.count * (c.name == "matrix_product")
            share = times * slots / simdgroups
            classes[c.name] += share
            lines[c.place[0]] += share
            for where in set(c.place):
                called[where] += share
    slots = sum(classes.values())
    # A few constants are read once, into registers that all threads share.
    constant = {r.name for r in rows if r.is_constant}
    buffers = [
        b
        for name, b in counters["buffers"].items()
        if not (name in constant and b["distinct_read"] <= _SHARED_BYTES)
    ]
    moved = sum(b["fetched"] + b["written"] for b in buffers)
    needed = sum(b["distinct_read"] + b["distinct_written"] for b in buffers)
    work = Work(
        needed, max(0, moved - needed), issue, complex_unit, products, groups,
        -(-size // SIMD_WIDTH), counters["threadgroup_bytes"], counters["barriers_per_thread"],
        fit.half_registers,
    )  # fmt: skip
    return Profile(
        kernel, threads, groups, size, slots,
        in_lanes / (slots * simdgroups) if slots else 1.0,
        _sorted(classes), _sorted(lines), _sorted(called),
        sum(b["read"] + b["written"] for b in buffers), moved, needed,
        counters["lines_per_simdgroup_access"], counters["barriers_per_thread"],
        counters["threadgroup_bytes"], fit, work,
    )  # fmt: skip


def _sorted(counted: Counter[Any]) -> dict[Any, float]:
    return dict(counted.most_common())
