# SPDX-License-Identifier: MIT
"""How rows are cut into slices, each of them for a threadgroup."""

from typing import NamedTuple

from metalcore.metal.program import Policy, Size

EXACT = 1
"""The number of the level in schemas."""
LIMB_THREADS = 128
"""Whose limbs fill half of a threadgroup's memory for sums, and most of it for products."""
SUM_ROWS, DOT_ROWS = 24, 42
"""Limbs and counts of a slice, as in limbs.h."""
_MOST_SLICES = 32768
"""Whose limbs add up in 64 bits."""


class Slices(NamedTuple):
    size: int
    groups: int

    @classmethod
    def of(cls, n: int, threads: int, policy: Policy) -> "Slices":
        size = max(threads * policy["values_per_thread"], -(-n // _MOST_SLICES))
        return cls(size, -(-n // size))

    def grid(self, rows: int, threads: int) -> tuple[Size, Size]:
        return (self.groups * threads, rows, 1), (threads, 1, 1)
