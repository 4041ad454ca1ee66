# SPDX-License-Identifier: MIT
"""Launches of det."""

import torch
from torch import Tensor

from metalcore._policy import Values
from metalcore.metal.launch import MSL_TYPE, Call, Launch, Planned, Step, metal_kernel
from metalcore.metal.linalg import lu

FILE = "linalg/det.metal"


@metal_kernel("det")
def plan(policy: Values, A: Tensor) -> Planned | None:
    if A.dtype not in MSL_TYPE:
        return None
    *batch, n, _ = A.shape
    if A.numel() == 0:
        # the product of no pivots is one
        one = A.new_ones(batch)
        return [], (one, one.clone(), A.new_zeros(batch))
    results = tuple(A.new_empty(batch, dtype=torch.float32) for _ in range(3))
    steps = _steps(policy, A.float().contiguous().view(-1, n, n), results)
    if A.dtype == torch.float32:
        return steps, results
    rounded = tuple(torch.empty_like(x, dtype=A.dtype) for x in results)
    steps += [Call(r.copy_, (x,)) for r, x in zip(rounded, results, strict=True)]
    return steps, rounded


def _steps(policy: Values, A: Tensor, results: tuple[Tensor, ...]) -> list[Step]:
    batch, n, _ = A.shape
    width = lu.lanes_for(n)
    if width is not None:
        shared = lu.in_simdgroups(batch, width)
        return [Launch(FILE, "det_simdgroup", f"{width}", (A, *results, batch, n), **shared)]
    if n <= lu.THREADGROUP_ROWS:
        threads, group = (batch * lu.THREADGROUP_ROWS, 1, 1), (lu.THREADGROUP_ROWS, 1, 1)
        return [Launch(FILE, "det_threadgroup", "float", (A, *results, n), threads, group)]
    steps, found = lu.factor(A)
    args = (found.rows, found.U, *results, n)
    threads, group = (batch * policy["threads"], 1, 1), (policy["threads"], 1, 1)
    return [*steps, Launch(FILE, "det_of_factors", "float", args, threads, group)]
