# SPDX-License-Identifier: MIT
"""Programs of lu."""

from typing import NamedTuple

import torch

from metalcore._policy import policy
from metalcore.metal.linalg._matrices import matrices
from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import MSL_TYPE, SIMD_WIDTH, Arguments, Buffer, Program, round_up

FILE = "linalg/lu.metal"

# Simdgroups of a kernel of one simdgroup per matrix, at most.
SIMDGROUPS = 4
# Rows and columns of the kernel of one threadgroup per matrix.
THREADGROUP_ROWS = 64


class Factors(NamedTuple):
    """Of A [batch, m, n]: row i of L U is row rows[i] of A; info as LAPACK counts it."""

    rows: Buffer
    L: Buffer
    U: Buffer
    info: Buffer


class Share(NamedTuple):
    """Template arguments, threads and group for matrices that take a few lanes each."""

    variant: tuple[int, int]
    threads: int
    group: int


def in_simdgroups(batch: int, n: int) -> Share | None:
    """For `batch` matrices of n rows, if a simdgroup has as many lanes."""
    width = next((width for width in (8, 16, 32) if n <= width), None)
    if width is None:
        return None
    simdgroups = -(-batch * width // SIMD_WIDTH)
    group = min(SIMDGROUPS, simdgroups) * SIMD_WIDTH
    return Share((width, SIMDGROUPS), round_up(simdgroups * SIMD_WIDTH, group), group)


@metal_kernel("lu")
def plan(p: Program, a: Arguments) -> tuple[Buffer, Buffer, Buffer]:
    A = a.A
    *batch, m, n = A.shape
    k = min(m, n)
    P, L, U = p.new((*batch, m, m), A.dtype), p.new((*batch, m, k)), p.new((*batch, k, n))
    if A.numel == 0:
        p.identity(P)
    else:
        found = factor(p, matrices(p, A), L=L, U=U)
        group = min(p.policy["column_threads"], round_up(m, SIMD_WIDTH))
        threads = (round_up(m, group), m, found.rows.shape[0])
        variant = (MSL_TYPE[A.dtype],)
        p.launch(FILE, "lu_permutation", variant, (found.rows, P, m), threads, group)
    return P, p.rounded(L, A.dtype), p.rounded(U, A.dtype)


def factor(
    p: Program,
    A: Buffer,
    *,
    L: Buffer | None = None,
    U: Buffer | None = None,
    info: Buffer | None = None,
) -> Factors:
    """Factor A [batch, m, n], contiguous float32 and not empty, for the program of any op; into
    the buffers that are given."""
    batch, m, n = A.shape
    k = min(m, n)
    found = Factors(
        p.new((batch, m), torch.int64),
        L or p.new((batch, m, k)),
        U or p.new((batch, k, n)),
        info or p.new((batch,), torch.int32),
    )
    share = in_simdgroups(batch, max(m, n))
    if share is not None:
        p.launch(FILE, "lu_simdgroup", share.variant, (A, *found, batch, m, n), *share[1:])
    elif max(m, n) <= THREADGROUP_ROWS:
        threads = batch * THREADGROUP_ROWS
        p.launch(FILE, "lu_threadgroup", (), (A, *found, m, n), threads, THREADGROUP_ROWS)
    else:
        _in_panels(p, A, found)
    return found


def _in_panels(p: Program, A: Buffer, found: Factors) -> None:
    batch, m, n = A.shape
    k, values = min(m, n), policy("lu", "metal")
    LU = p.copy(p.new_like(A), A)
    pivots = p.new((batch, values["panel"]), torch.int32)
    group = min(values["column_threads"], round_up(n, SIMD_WIDTH))
    for first in range(0, k, values["panel"]):
        last = min(k, first + values["panel"])
        _panel(p, LU, found, pivots, first, last)
        if n > last - first:
            args = (pivots, LU, LU, m, n, first, last)
            threads = (round_up(n, group), batch, 1)
            p.launch(FILE, "lu_columns", (values["panel"],), args, threads, group)
        left, top = LU[:, last:, first:last], LU[:, first:last, last:]
        p.matmul(LU[:, last:, last:], left, top, alpha=-1.0, beta=1.0)
    threads = (round_up(n, group), m, batch)
    p.launch(FILE, "lu_finish", (), (LU, found.L, found.U, m, n), threads, group)


def _panel(p: Program, LU: Buffer, found: Factors, pivots: Buffer, first: int, last: int) -> None:
    """Factors columns first..last of LU from row `first` on."""
    batch, m, n = LU.shape
    values = policy("lu", "metal")
    # by columns, so that neighbouring threads read neighbouring rows
    panel = p.new((batch, last - first, m - first))
    threads = min(values["panel_threads"], round_up(m - first, SIMD_WIDTH))
    rows, info = found.rows, found.info
    args = (LU, rows, info, panel, pivots, rows, info, m, n, first, last)
    p.launch(FILE, "lu_panel", (values["panel"],), args, batch * threads, threads)
    p.copy(LU[:, first:, first:last], panel.mT)
