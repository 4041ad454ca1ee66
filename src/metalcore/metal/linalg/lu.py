# SPDX-License-Identifier: MIT
"""Launches of lu."""

from typing import NamedTuple

import torch
from torch import Tensor

from metalcore._policy import Values, policy
from metalcore.metal.launch import (
    MSL_TYPE,
    SIMD_WIDTH,
    Call,
    Launch,
    Planned,
    Step,
    metal_kernel,
    round_up,
)

FILE = "linalg/lu.metal"

# Simdgroups for which a kernel of one simdgroup per matrix has threadgroup memory.
SIMDGROUPS = 4
# Rows and columns of the kernel of one threadgroup per matrix.
THREADGROUP_ROWS = 64


class Factors(NamedTuple):
    """Of A [batch, m, n]: row i of L U is row rows[i] of A; info as LAPACK counts it."""

    rows: Tensor
    L: Tensor
    U: Tensor
    info: Tensor


def lanes_for(n: int) -> int | None:
    """Lanes that one matrix of n rows takes, if a simdgroup has as many."""
    return next((width for width in (8, 16, 32) if n <= width), None)


def in_simdgroups(batch: int, width: int) -> dict[str, tuple[int, int, int]]:
    """Threads and groups for `batch` matrices of `width` lanes each."""
    simdgroups = -(-batch * width // SIMD_WIDTH)
    group = min(SIMDGROUPS, simdgroups) * SIMD_WIDTH
    return {"threads": (round_up(simdgroups * SIMD_WIDTH, group), 1, 1), "group": (group, 1, 1)}


def factor(A: Tensor) -> tuple[list[Step], Factors]:
    """Steps that factor A [batch, m, n], contiguous float32 and not empty."""
    batch, m, n = A.shape
    k = min(m, n)
    rows = torch.arange(m, device=A.device).expand(batch, m).contiguous()
    info = torch.zeros(batch, dtype=torch.int32, device=A.device)
    found = Factors(rows, A.new_empty(batch, m, k), A.new_empty(batch, k, n), info)
    width = lanes_for(max(m, n))
    if width is not None:
        shared = in_simdgroups(batch, width)
        return [Launch(FILE, "lu_simdgroup", f"{width}", (A, *found, batch, m, n), **shared)], found
    if max(m, n) <= THREADGROUP_ROWS:
        threads, group = (batch * THREADGROUP_ROWS, 1, 1), (THREADGROUP_ROWS, 1, 1)
        return [Launch(FILE, "lu_threadgroup", "float", (A, *found, m, n), threads, group)], found
    return _in_panels(A, found), found


def _in_panels(A: Tensor, found: Factors) -> list[Step]:
    batch, m, n = A.shape
    k = min(m, n)
    values = policy("lu", "metal")
    LU = torch.empty_like(A)
    pivots = torch.empty(batch, SIMD_WIDTH, dtype=torch.int32, device=A.device)
    steps: list[Step] = [Call(LU.copy_, (A,))]
    for first in range(0, k, values["panel"]):
        last = min(k, first + values["panel"])
        columns = LU[:, first:, first:last]
        # by columns, so that neighbouring threads read neighbouring rows
        panel = A.new_empty(batch, last - first, m - first)
        threads = min(values["panel_threads"], round_up(m - first, SIMD_WIDTH))
        steps += [
            Call(panel.copy_, (columns.mT,)),
            Launch(
                FILE,
                "lu_panel",
                "float",
                (panel, pivots, found.rows, found.info, m - first, last - first, first),
                threads=(batch * threads, 1, 1),
                group=(threads, 1, 1),
            ),
            Call(columns.copy_, (panel.mT,)),
        ]
        if n > last - first:
            group = min(values["column_threads"], round_up(n, SIMD_WIDTH))
            steps.append(
                Launch(
                    FILE,
                    "lu_columns",
                    "float",
                    (pivots, LU, m, n, first, last),
                    threads=(round_up(n, group), batch, 1),
                    group=(group, 1, 1),
                )
            )
        rest = LU[:, last:, last:]
        if rest.numel():
            left, top = LU[:, last:, first:last], LU[:, first:last, last:]
            steps.append(Call(rest.baddbmm_, (left, top), {"alpha": -1}))
    return [
        *steps,
        Call(torch.tril, (LU[:, :, :k], -1), {"out": found.L}),
        Call(found.L.diagonal(dim1=-2, dim2=-1).fill_, (1,)),
        Call(torch.triu, (LU[:, :k],), {"out": found.U}),
    ]


@metal_kernel("lu")
def plan(_: Values, A: Tensor) -> Planned | None:
    if A.dtype not in MSL_TYPE:
        return None
    *batch, m, n = A.shape
    k = min(m, n)
    if A.numel() == 0:
        P = torch.eye(m, dtype=A.dtype, device=A.device).expand(*batch, m, m).contiguous()
        return [], (P, A.new_empty(*batch, m, k), A.new_empty(*batch, k, n))
    steps, found = factor(A.float().contiguous().view(-1, m, n))
    # column i of P has its one in row rows[i]
    P = A.new_zeros(*batch, m, m)
    steps.append(Call(P.scatter_, (-2, found.rows.view(*batch, 1, m), 1.0)))
    L, U = found.L.view(*batch, m, k), found.U.view(*batch, k, n)
    if A.dtype != torch.float32:
        rounded = [torch.empty_like(x, dtype=A.dtype) for x in (L, U)]
        steps += [Call(r.copy_, (x,)) for r, x in zip(rounded, (L, U), strict=True)]
        L, U = rounded
    return steps, (P, L, U)
