# SPDX-License-Identifier: MIT
"""Programs of solve."""

import torch

from metalcore.metal.linalg import lu, trsm
from metalcore.metal.linalg._matrices import as_right_sides, matrices
from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import Arguments, Buffer, Program, round_up

FILE = "linalg/solve.metal"


@metal_kernel("solve")
def plan(p: Program, a: Arguments) -> tuple[Buffer, Buffer]:
    A, B = a.A, a.B
    X, info = p.new(B.shape), p.new(B.shape[:-2], torch.int32)
    if A.numel == 0:
        p.fill(info, 0)
    elif B.numel and B.shape[-2] <= lu.THREADGROUP_ROWS and not a.refine:
        _in_one_launch(p, matrices(p, A), matrices(p, B), matrices(p, X), info)
    else:
        factors = lu.factor(p, matrices(p, A), info=info)
        if B.numel:
            right, x = matrices(p, B), matrices(p, X)
            _substitute(p, factors, right, x)
            for _ in range(p.policy["refinements"] if a.refine else 0):
                _refine(p, matrices(p, A), right, x, factors)
    return as_right_sides(p, X, B), info


def _in_one_launch(p: Program, A: Buffer, B: Buffer, X: Buffer, info: Buffer) -> None:
    """For n up to 64."""
    batch, n, k = B.shape
    share = lu.in_simdgroups(batch, n)
    if share is not None:
        args = (A, B, X, info, batch, n, k)
        p.launch(FILE, "solve_simdgroup", share.variant, args, *share[1:])
    else:
        rows = lu.THREADGROUP_ROWS
        p.launch(FILE, "solve_threadgroup", (), (A, B, X, info, n, k), batch * rows, rows)


def _substitute(p: Program, factors: lu.Factors, B: Buffer, X: Buffer) -> None:
    """X = U^-1 L^-1 B[rows]."""
    batch, n, _ = X.shape
    p.gather(X, B, 1, factors.rows.view(batch, n, 1).expand(*X.shape))
    trsm.in_place(p, factors.L, X, trsm.Kind(lower=True, unit=True))
    trsm.in_place(p, factors.U, X, trsm.Kind(lower=False))


def _refine(p: Program, A: Buffer, B: Buffer, X: Buffer, factors: lu.Factors) -> None:
    """X += solution of what is left of B - A X."""
    _, n, k = B.shape
    R, D = p.new_like(B), p.new_like(B)
    group = p.policy["residual_threads"]
    threads = round_up(B.numel, group)
    p.launch(FILE, "solve_residual", (), (A, X, B, R, n, k, B.numel), threads, group)
    _substitute(p, factors, R, D)
    p.launch(FILE, "solve_add", (), (X, D, X, B.numel), threads, group)
