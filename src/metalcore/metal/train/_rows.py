# SPDX-License-Identifier: MIT
"""How threads share the rows of a tensor."""

from dataclasses import dataclass

import torch

from metalcore.metal.program import MSL_TYPE, SIMD_WIDTH, Buffer, Policy, Size, round_up

# Chunks of a row that a thread keeps in registers while there are threads for more of them.
KEEP = 4
# And the most, by the width of a chunk: 512 threads of an M1 or M2 have registers for 208 half
# floats each, and use most of them to compute with.
_KEEP_MOST = {4: 8, 1: 16}


@dataclass(frozen=True)
class RowShare:
    """`lanes` threads share a row of `chunks` of `width` values; `rows` of them make a group."""

    width: int
    chunks: int
    lanes: int
    rows: int

    @classmethod
    def of(
        cls, n: int, buffers: tuple[Buffer, ...], policy: Policy, keep: int = KEEP
    ) -> "RowShare":
        """One simdgroup per row while it can keep the row, then as many threads as keep it with
        `keep` chunks each, up to `threads` of them."""
        width = 4 if n % 4 == 0 and all(b.is_aligned for b in buffers) else 1
        chunks = n // width
        lanes = min(policy["threads"], round_up(-(-chunks // keep), SIMD_WIDTH))
        rows = policy.get("simdgroups", 1) if lanes == SIMD_WIDTH else 1
        return cls(width, chunks, lanes, rows)

    @property
    def keep(self) -> int:
        """Chunks for which a thread takes registers: all of its own if it can. Of a longer row it
        keeps few, so that more groups run at a time."""
        most = _KEEP_MOST[self.width]
        return most if KEEP * self.lanes < self.chunks <= most * self.lanes else KEEP

    def variant(self, *dtypes: torch.dtype) -> tuple[str | int, ...]:
        """The template arguments of kernels of these dtypes."""
        return *(MSL_TYPE[d] for d in dtypes), self.width

    @classmethod
    def of_gradients(
        cls, n: int, buffers: tuple[Buffer, ...], policy: Policy, keep: int
    ) -> "RowShare":
        """By fewer threads, which keep several rows and sums beside them."""
        return cls.of(n, buffers, {**policy, "threads": policy["backward_threads"]}, keep)

    def busy_groups(self, policy: Policy) -> int:
        """Rows at a time that give all cores of the GPU the same work."""
        of_core: int = max(1, policy["threads_per_core"] // self.lanes)
        return of_core * int(policy["gpu_cores"])

    def grid(self, rows: int) -> tuple[Size, Size]:
        """The threads of `rows` rows, lanes by rows, and those of a group."""
        return (self.lanes, rows, 1), (self.lanes, min(self.rows, rows), 1)
