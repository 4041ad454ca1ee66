# SPDX-License-Identifier: MIT
"""How threads share the rows of a tensor."""

from dataclasses import dataclass

import torch
from torch import Tensor

from metalcore._policy import Values
from metalcore.metal.launch import MAX_THREADS_PER_GROUP, MSL_TYPE, SIMD_WIDTH, Size, round_up

# Chunks of a row that a thread keeps in registers, as the kernels have it.
KEEP = 4


@dataclass(frozen=True)
class RowShare:
    """`lanes` threads share a row of `chunks` of `width` values; `rows` of them make a group."""

    width: int
    chunks: int
    lanes: int
    rows: int

    @classmethod
    def of(cls, n: int, tensors: tuple[Tensor, ...], policy: Values) -> "RowShare":
        """One simdgroup per row while it can keep the row, then up to `threads` threads, and more
        only where these cannot keep it."""
        width = 4 if n % 4 == 0 and all(t.storage_offset() % 4 == 0 for t in tensors) else 1
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

    def variant(self, *dtypes: torch.dtype) -> str:
        """The name that kernels of these dtypes end in."""
        return "_".join([*(MSL_TYPE[d] for d in dtypes), str(self.width)])

    def norm_variant(self, x: torch.dtype, weight: torch.dtype) -> str:
        """The same for norms, which keep rows as they are stored: half types fit without more."""
        more = self.is_long and x == torch.float32 and self.width == 4
        return ("long_" if more else "") + self.variant(x, weight)

    def grid(self, rows: int) -> tuple[Size, Size]:
        """The threads of `rows` rows, and of a group."""
        group = self.lanes * min(self.rows, rows)
        return (round_up(rows * self.lanes, group), 1, 1), (group, 1, 1)
