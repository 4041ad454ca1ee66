# SPDX-License-Identifier: MIT
"""Programs of trsm."""

from typing import NamedTuple

from metalcore._policy import policy
from metalcore.metal.linalg._matrices import as_right_sides, matrices
from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import (
    MAX_THREADGROUP_BYTES,
    SIMD_WIDTH,
    Arguments,
    Buffer,
    Program,
    Size,
    round_up,
)

FILE = "linalg/trsm.metal"

# Rows that a kernel solves at once, and right sides up to which their rows stand in lanes.
BLOCK = 64
_FEW = 16


class Kind(NamedTuple):
    """Which triangle of A is read, whether it is transposed, and whether its diagonal is ones."""

    lower: bool
    transpose: bool = False
    unit: bool = False


class Share(NamedTuple):
    """How the systems of a launch are shared out."""

    kernel: str
    """`rows` or `columns`: what stands in a thread."""
    variant: tuple[int, ...]
    threads: Size
    group: Size


def share(op: str, batch: int, n: int, k: int) -> Share:
    """For `batch` systems of n <= BLOCK rows and k right sides each."""
    simdgroups = policy(op, "metal")["simdgroups"]
    if k <= _FEW:
        width, keep = next(w for w in ((8, 1), (16, 1), (32, 1), (32, 2)) if n <= w[0] * w[1])
        values = SIMD_WIDTH * keep * (width * keep + 1 + _FEW)
        fit = min(simdgroups, MAX_THREADGROUP_BYTES // (4 * values))
        groups = -(-batch * width // (SIMD_WIDTH * fit))
        threads, group = groups * fit * SIMD_WIDTH, fit * SIMD_WIDTH
        return Share("rows", (width, keep, _FEW, fit), (threads, 1, 1), (group, 1, 1))
    group = min(simdgroups * SIMD_WIDTH, round_up(k, SIMD_WIDTH))
    block = next(size for size in (16, 32, BLOCK) if n <= size)
    return Share("columns", (block,), (round_up(k, group), batch, 1), (group, 1, 1))


@metal_kernel("trsm")
def plan(p: Program, a: Arguments) -> Buffer:
    A, B = a.A, a.B
    if B.numel == 0:
        return p.new_like(B)
    kind = Kind(a.lower, a.transpose, a.unit_diagonal)
    X = p.new(B.shape)
    if B.shape[-2] <= BLOCK:
        _block(p, matrices(p, A), matrices(p, B), matrices(p, X), 0, kind)
    else:
        in_place(p, matrices(p, A), matrices(p, p.copy(X, B)), kind)
    return as_right_sides(p, X, B)


def in_place(p: Program, A: Buffer, X: Buffer, kind: Kind) -> None:
    """Solve op(A) X = B where X holds B before. A [batch, n, n] and X [batch, n, k], both
    contiguous float32 and not empty."""
    n, downwards = X.shape[-2], kind.lower != kind.transpose
    starts = range(0, n, BLOCK)
    for start in starts if downwards else reversed(starts):
        stop = min(n, start + BLOCK)
        _block(p, A, X, X, start, kind)
        rest = slice(stop, n) if downwards else slice(0, start)
        left = A[:, start:stop, rest].mT if kind.transpose else A[:, rest, start:stop]
        p.matmul(X[:, rest], left, X[:, start:stop], alpha=-1.0, beta=1.0)


def _block(p: Program, A: Buffer, B: Buffer, X: Buffer, start: int, kind: Kind) -> None:
    """X = op(A)^-1 B for the rows from `start` on, up to BLOCK of them, on the diagonal of A."""
    batch, order, k = X.shape
    n = min(BLOCK, order - start)
    kernel, variant, threads, group = share("trsm", batch, n, k)
    args = (A, B, X, batch, order, k, start, n)
    p.launch(FILE, f"trsm_{kernel}", (*variant, *kind), args, threads, group)
