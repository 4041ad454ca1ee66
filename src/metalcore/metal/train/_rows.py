# SPDX-License-Identifier: MIT
"""How threads share the rows of a tensor."""

from dataclasses import dataclass

import torch

from metalcore.metal.program import (
    MAX_THREADS_PER_GROUP,
    MSL_TYPE,
    SIMD_WIDTH,
    Buffer,
    Policy,
    round_up,
)

# Chunks of a row that a thread keeps in registers, 16 of them for four floats each.
KEEP = 4
# Registers that it keeps of a row too long for these, nearly what 1024 threads can have beside
# those that they work with.
LONG_REGISTERS = 28


@dataclass(frozen=True)
class RowShare:
    """`lanes` threads share a row of `chunks` of `width` values; `rows` of them make a group."""

    width: int
    chunks: int
    lanes: int
    rows: int

    @classmethod
    def of(cls, n: int, buffers: tuple[Buffer, ...], policy: Policy) -> "RowShare":
        """One simdgroup per row while it can keep the row, then up to `threads` threads, and more
        only where these cannot keep it."""
        width = 4 if n % 4 == 0 and all(b.is_aligned for b in buffers) else 1
        chunks = n // width
        lanes = round_up(-(-chunks // KEEP), SIMD_WIDTH)
        if lanes > policy["threads"]:
            lanes = min(lanes, MAX_THREADS_PER_GROUP)
        rows = policy.get("simdgroups", 1) if lanes == SIMD_WIDTH else 1
        return cls(width, chunks, lanes, rows)

    @property
    def is_long(self) -> bool:
        """Whether threads cannot keep the row in the registers of KEEP chunks."""
        return self.chunks > KEEP * self.lanes

    def variant(self, *dtypes: torch.dtype) -> tuple[str | int, ...]:
        """The template arguments of kernels of these dtypes."""
        return *(MSL_TYPE[d] for d in dtypes), self.width

    def norm_variant(self, x: torch.dtype, weight: torch.dtype) -> tuple[str | int, ...]:
        """The same for norms, which keep rows as they are stored, and how many chunks of them:
        half types fit without more."""
        long = self.is_long and self.width == 4
        keep = 2 * KEEP if x != torch.float32 else LONG_REGISTERS // 4 if long else KEEP
        return *self.variant(x, weight), keep

    def grid(self, rows: int) -> tuple[int, int]:
        """The threads of `rows` rows, and of a group."""
        group = self.lanes * min(self.rows, rows)
        return round_up(rows * self.lanes, group), group
