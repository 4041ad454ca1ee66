# SPDX-License-Identifier: MIT
"""What is wrong with kernels by what they take of a GPU, before they run."""

from __future__ import annotations

from .build import Builder
from .fit import HALF_REGISTERS, Fit, fits_of
from .report import Finding

# Code that an instruction cache holds, and the most that is read again and again without harm.
CACHE_BYTES = 12 * 1024
CODE_BYTES = 48 * 1024


def static_findings(builder: Builder) -> list[Finding]:
    """Of all kernels of a source."""
    found = []
    for name, fit in fits_of(builder).items():
        place = (str(builder.index.kernels[name]["file"]), int(builder.index.kernels[name]["line"]))
        found += _of_kernel(name, place, fit)
    return found


def _of_kernel(kernel: str, place: tuple[str, int], fit: Fit) -> list[Finding]:
    found = [
        Finding(
            "registers",
            f"{array.name} is not in registers: an index is no constant; unroll its loop",
            kernel,
            array.file,
            array.line,
        )
        for array in fit.arrays
    ]
    if fit.spills:
        found.append(
            Finding(
                "spills",
                f"it wants {fit.half_registers} half registers of {HALF_REGISTERS}: "
                "some are kept in memory; keep less per thread",
                kernel,
                *place,
            )
        )
    found += [
        Finding(
            "division",
            "64-bit division by a number that is no constant, hundreds of instructions on a GPU; "
            "divide numbers of 32 bits",
            kernel,
            *line,
        )
        for line in fit.divisions
    ]
    if fit.code_bytes > CODE_BYTES:
        found.append(
            Finding(
                "code",
                f"about {fit.code_bytes >> 10} KiB of code, at most {CODE_BYTES >> 10} are fetched "
                "without stalls; unroll less",
                kernel,
                *place,
            )
        )
    if fit.loop_bytes > CACHE_BYTES:
        found.append(
            Finding(
                "code",
                f"a loop of about {fit.loop_bytes >> 10} KiB of code, the instruction cache holds "
                f"{CACHE_BYTES >> 10}; unroll less",
                kernel,
                *(fit.loop if fit.loop[0] else place),
            )
        )
    return found
