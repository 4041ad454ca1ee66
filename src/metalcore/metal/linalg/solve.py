# SPDX-License-Identifier: MIT
"""Launches of solve."""

import torch
from torch import Tensor

from metalcore._policy import Values
from metalcore.metal.launch import MSL_TYPE, Call, Launch, Planned, Step, metal_kernel, round_up
from metalcore.metal.linalg import lu, trsm

FILE = "linalg/solve.metal"


def _in_one_launch(A: Tensor, B: Tensor) -> tuple[Launch, Tensor, Tensor]:
    """For n up to 64: X and info."""
    batch, n, k = B.shape
    X, info = torch.empty_like(B), torch.empty(batch, dtype=torch.int32, device=A.device)
    width = lu.lanes_for(n)
    if width is not None:
        shared = lu.in_simdgroups(batch, width)
        launch = Launch(FILE, "solve_simdgroup", f"{width}", (A, B, X, info, batch, n, k), **shared)
        return launch, X, info
    rows = lu.THREADGROUP_ROWS
    threads, group = (batch * rows, 1, 1), (rows, 1, 1)
    args = (A, B, X, info, n, k)
    return Launch(FILE, "solve_threadgroup", "float", args, threads, group), X, info


def _substitute(factors: lu.Factors, B: Tensor, X: Tensor) -> list[Step]:
    """X = U^-1 L^-1 B[rows]."""
    rows = factors.rows.unsqueeze(-1).expand(X.shape)
    return [
        Call(torch.gather, (B, 1, rows), {"out": X}),
        *trsm.steps(factors.L, X, lower=True, unit_diagonal=True),
        *trsm.steps(factors.U, X, lower=False),
    ]


def _refine(policy: Values, A: Tensor, B: Tensor, X: Tensor, factors: lu.Factors) -> list[Step]:
    """X += solution of what is left of B - A X."""
    _, n, k = B.shape
    R, D = torch.empty_like(B), torch.empty_like(B)
    group = policy["residual_threads"]
    residual = Launch(
        FILE,
        "solve_residual",
        "float",
        (A, X, B, R, n, k, B.numel()),
        threads=(round_up(B.numel(), group), 1, 1),
        group=(group, 1, 1),
    )
    return [residual, *_substitute(factors, R, D), Call(X.add_, (D,))] * policy["refinements"]


@metal_kernel("solve")
def plan(policy: Values, A: Tensor, B: Tensor, refine: bool) -> Planned | None:
    if A.dtype not in MSL_TYPE:
        return None
    shape, n, k = B.shape, B.shape[-2], B.shape[-1]
    if A.numel() == 0:
        info = torch.zeros(shape[:-2], dtype=torch.int32, device=A.device)
        return [], (torch.empty_like(B, memory_format=torch.contiguous_format), info)
    matrices = A.float().contiguous().view(-1, n, n)
    right = B.float().contiguous().view(matrices.shape[0], n, k)
    steps: list[Step]
    if n <= lu.THREADGROUP_ROWS and k and not refine:
        launch, X, info = _in_one_launch(matrices, right)
        steps = [launch]
    else:
        steps, factors = lu.factor(matrices)
        X, info = torch.empty_like(right), factors.info
        if k:
            steps += _substitute(factors, right, X)
            steps += _refine(policy, matrices, right, X, factors) if refine else []
    X, info = X.view(shape), info.view(shape[:-2])
    if A.dtype != torch.float32:
        rounded = torch.empty_like(X, dtype=A.dtype)
        return [*steps, Call(rounded.copy_, (X,))], (rounded, info)
    return steps, (X, info)
