# SPDX-License-Identifier: MIT
"""How long a launch would take on an Apple GPU: the longest of what it must do, and how sure.

A launch moves bytes, issues instructions, keeps the unit for complex functions busy, and starts
threadgroups. They overlap, so the longest decides. Constants are in `chips.toml`. What the model
does not know: bank conflicts, contention of atomics, and any kernel that mostly waits.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .compiler import PACKAGE
from .fit import GROUPS, largest_group

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SIMD_WIDTH = 32
# Chips that a profile shows where none is asked for.
USUAL = ("M1", "M2 Max", "M4 Pro")
# From so many barriers on, a thread mostly waits for others.
BARRIER_CHAIN = 16
# A limiter decides alone when it takes this many times as long as the next.
CLEARLY = 2.0

LATENCY = "no estimate: latency-bound"
TOO_LARGE = "does not start: its registers allow no group of this size"


@dataclass(frozen=True, slots=True)
class Chip:
    """One GPU. Bandwidth in bytes per second, the cache in bytes."""

    name: str
    generation: int
    cores: int
    hertz: float
    bandwidth: float
    cache: int
    group_start_cycles: float

    @property
    def flops(self) -> float:
        """Its peak in float32: two for each lane and cycle."""
        return 2 * constant("core", "lanes_per_cycle") * self.cores * self.hertz


@dataclass(frozen=True, slots=True)
class Work:
    """What a launch does. Slots are those of all its simdgroups together; `read_again` are bytes
    that a threadgroup asks for more than once."""

    needed: float
    read_again: float
    issue: float
    complex: float
    products: int
    groups: int
    group_simdgroups: int
    threadgroup_bytes: int
    barriers: float
    # of 16 bits, those of one thread; 0 where they are not known
    half_registers: int = 0


@dataclass(frozen=True, slots=True)
class Estimate:
    """Milliseconds of one launch on a chip. `total` is None where no rule covers it."""

    chip: str
    memory: float
    issue: float
    complex: float
    starts: float
    resident: int
    limiter: str
    total: float | None
    confidence: str

    @property
    def issue_share(self) -> float:
        """Time of the busier of the two kinds of units, over that of the memory."""
        return max(self.issue, self.complex) / self.memory if self.memory else float("inf")


@lru_cache(maxsize=1)
def table() -> dict[str, Any]:
    """`chips.toml` as it is written."""
    found: dict[str, Any] = tomllib.loads((PACKAGE / "chips.toml").read_text())
    return found


def constant(section: str, name: str) -> float:
    """A figure of `chips.toml` without its source."""
    return float(table()[section][name][0])


@lru_cache(maxsize=1)
def chips() -> dict[str, Chip]:
    """All chips, by name."""
    found = {}
    for entry in table()["chip"]:
        name = entry["name"]
        generation = name.split()[0][1:]
        starts = constant("group_start_cycles", generation)
        found[name] = Chip(
            name,
            int(generation),
            entry["cores"][0],
            entry["ghz"][0] * 1e9,
            entry["bandwidth"][0] * 1e9,
            round(entry["cache"][0] * 1e6),
            starts,
        )
    return found


def chip(name: str) -> Chip:
    """The chip of that name, however it is spelled: `m2max` is M2 Max."""
    for known, found in chips().items():
        if "".join(known.lower().split()) == "".join(name.lower().split()):
            return found
    raise ValueError(f"no chip {name!r}; there are {', '.join(chips())}")


def memory_seconds(chip: Chip, moved: float) -> float:
    """Time to move bytes between memory and the GPU."""
    return moved / (constant("model", "memory_share") * chip.bandwidth)


def matmul_seconds(chip: Chip, flops: float) -> float:
    """Time of a large product of matrices, as the libraries reach it."""
    return flops / (constant("model", "matmul_share") * chip.flops)


def issue_seconds(chip: Chip, slots: float) -> float:
    """Time of issue slots of simdgroups, on cores that have enough of them."""
    return slots * SIMD_WIDTH / (constant("core", "lanes_per_cycle") * chip.cores * chip.hertz)


def resident_simdgroups(chip: Chip, work: Work) -> int:
    """Simdgroups of this launch that a core holds at a time."""
    room = int(constant("core", "simdgroups"))
    if work.half_registers and chip.generation <= 2:
        room = min(room, _by_registers(work.half_registers))
    groups = max(1, room // work.group_simdgroups)
    if work.threadgroup_bytes:
        bytes_of_core = int(constant("core", "threadgroup_bytes"))
        groups = max(1, min(groups, bytes_of_core // work.threadgroup_bytes))
    groups = min(groups, max(1, work.groups // chip.cores))
    return groups * work.group_simdgroups


def _by_registers(half_registers: int) -> int:
    """Simdgroups of a core, by the registers of a thread. Beyond 104, they come in steps."""
    if half_registers > min(GROUPS):
        return largest_group(half_registers) // SIMD_WIDTH
    return int(constant("core", "register_bytes")) // (2 * half_registers * SIMD_WIDTH)


def _starts(chip: Chip, work: Work) -> bool:
    """Whether a threadgroup is as small as the registers of its threads ask for."""
    limited = work.half_registers and chip.generation <= 2
    return not limited or work.group_simdgroups * SIMD_WIDTH <= largest_group(work.half_registers)


def estimate(chip: Chip, work: Work) -> Estimate:
    """What `work` would take on `chip`."""
    resident = resident_simdgroups(chip, work)
    busy = min(1.0, resident / constant("core", "simdgroups_to_saturate"))
    # What the groups in flight have read stays in the cache while it has room for it.
    in_flight = min(1.0, chip.cores * resident / work.group_simdgroups / max(1, work.groups))
    moved = work.needed
    if in_flight * work.needed > chip.cache:
        moved += work.read_again
    times = {
        "memory": 1e3 * memory_seconds(chip, moved),
        "issue": 1e3 * issue_seconds(chip, work.issue) / busy,
        "complex": 1e3 * issue_seconds(chip, work.complex) / busy,
        "starts": 1e3 * work.groups * chip.group_start_cycles / (chip.cores * chip.hertz),
    }
    limiter, next_one = sorted(times, key=lambda name: -times[name])[:2]
    clear = times[limiter] >= CLEARLY * times[next_one]
    total: float | None = constant("model", "launch_us") * 1e-3 + times[limiter]
    if not _starts(chip, work):
        limiter, total, confidence = "registers", None, TOO_LARGE
    elif busy < 1 or work.barriers > BARRIER_CHAIN:
        limiter, total, confidence = "latency", None, LATENCY
    elif limiter == "memory" and work.needed <= chip.cache:
        confidence = "at most: its data may be in the cache"
    elif limiter == "memory" and clear:
        confidence = "+-15 %"
    elif work.products:
        confidence = "+-35 %"
    else:
        confidence = "a factor of 1.5"
    return Estimate(
        chip.name,
        times["memory"],
        times["issue"],
        times["complex"],
        times["starts"],
        resident,
        limiter,
        total,
        confidence,
    )
