# SPDX-License-Identifier: MIT
"""What is wrong with kernels by what they take of a GPU, before they run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

from .allow import Allowed
from .build import Builder
from .fit import GROUPS, HALF_REGISTERS, MARGIN, Fit, fits_of
from .report import Finding
from .signature import read_signatures

KINDS = frozenset({"fit", "spills", "registers", "division64", "code"})
# What an instruction cache holds, for loops, and the most code that a kernel should have.
CACHE_BYTES = 12 * 1024
CODE_BYTES = 48 * 1024
# A group of so many threads starts, whatever the kernel.
ALWAYS_STARTS = min(GROUPS.values())


def static_findings(builder: Builder, groups: Mapping[str, int]) -> list[Finding]:
    """Of all kernels of a source, with these groups, or else the largest that they declare."""
    known = {**_declared_groups(builder), **groups}
    return findings_of(builder, {name: known.get(name, 0) for name in builder.index.kernels})


def findings_of(builder: Builder, groups: Mapping[str, int]) -> list[Finding]:
    """Of the kernels named, each run with threadgroups of so many threads; 0 where that is not
    known. What a comment allows is left out."""
    source = builder.source
    allowed = Allowed(source.text, source.name, builder.index.dependencies, KINDS)
    found = [
        finding
        for name, fit in fits_of(builder, groups).items()
        for finding in _findings(builder, name, fit, groups[name])
        if not allowed(finding)
    ]
    return [*allowed.findings, *found]


def _declared_groups(builder: Builder) -> dict[str, int]:
    groups = {}
    for signature in read_signatures(builder.source.text).values():
        for kernel in signature.instances:
            # the text may not tell: then there is nothing to hold the kernel to
            with suppress(ValueError):
                groups[kernel] = signature.max_threads_of(kernel) or 0
    return groups


def _findings(builder: Builder, kernel: str, fit: Fit, group: int) -> Iterator[Finding]:
    file, line = builder.index.kernels[kernel]["defined"]
    place = (str(file), int(line))
    if not fit.fits(group):
        yield Finding("fit", _too_large(fit, group), kernel, *place)
    if fit.spills:
        yield Finding(
            "spills",
            f"it wants about {fit.half_registers} half registers, a thread has {HALF_REGISTERS}: "
            "the rest is in memory; keep less per thread",
            kernel,
            *place,
        )
    for array in fit.arrays:
        message = f"{array.name} is not in registers: an index is no constant; unroll its loop"
        yield Finding("registers", message, kernel, array.file, array.line)
    for division in fit.divisions:
        yield Finding(
            "division64",
            "a 64-bit division by what is no constant takes hundreds of instructions, for each "
            "thread; divide numbers of 32 bits, or once for a group",
            kernel,
            *(division if division[1] else place),
        )
    if fit.code_bytes > CODE_BYTES:
        yield Finding(
            "code",
            f"about {fit.code_bytes // 1024} KiB of code, {CODE_BYTES // 1024} are the most that "
            "is worth it; unroll less",
            kernel,
            *place,
        )
    if fit.loop_bytes > CACHE_BYTES:
        yield Finding(
            "code",
            f"a loop of about {fit.loop_bytes // 1024} KiB of code, the instruction cache holds "
            f"{CACHE_BYTES // 1024}; unroll less",
            kernel,
            *(fit.loop if fit.loop[1] else place),
        )


def _too_large(fit: Fit, group: int) -> str:
    start = f"a group of {group} threads, each with about {fit.half_registers} half registers"
    way_out = "take smaller groups, or keep less per thread"
    if group > fit.largest_group:
        return f"{start}, does not start on M1 and M2: {fit.largest_group} fit; {way_out}"
    return f"{start}, may not start on M1 and M2: no margin of {MARGIN}; {way_out}"
