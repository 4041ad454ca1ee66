# SPDX-License-Identifier: MIT
"""Launches of trsm."""

from collections.abc import Callable

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

# Rows that a kernel solves at once, and right sides up to which their rows stand in lanes.
BLOCK = 64
_FEW = 16
# Values of A and of X that the threadgroup memory of trsm_rows holds.
_A_TILE, _X_TILE = 4224, 2048


def steps(
    A: Tensor, X: Tensor, *, lower: bool, transpose: bool = False, unit_diagonal: bool = False
) -> list[Step]:
    """Solve op(A) X = B in place: X holds B before. A [batch, n, n] and X [batch, n, k], both
    contiguous float32 and not empty."""
    n = X.shape[-2]
    starts = list(range(0, n, BLOCK))
    if lower == transpose:
        starts.reverse()
    todo: list[Step] = []
    for start in starts:
        stop = min(n, start + BLOCK)
        todo.append(block("trsm", A, X, X, start, stop, (lower, transpose, unit_diagonal)))
        rest = slice(stop, n) if lower != transpose else slice(0, start)
        if X[:, rest].numel():
            left = A[:, start:stop, rest].mT if transpose else A[:, rest, start:stop]
            todo.append(Call(X[:, rest].baddbmm_, (left, X[:, start:stop]), {"alpha": -1}))
    return todo


def block(
    op: str, A: Tensor, B: Tensor, X: Tensor, start: int, stop: int, kind: tuple[bool, bool, bool]
) -> Launch:
    """The launch of `op` for rows `start` to `stop`, whose block of A stands on its diagonal; kind
    is lower, transpose, unit diagonal."""
    batch, order, k = X.shape
    n = stop - start
    where = (start * (order + 1), order, order * order, start * k, order * k)
    args = (A, B, X, batch, n, k, *where, *map(int, kind))
    simdgroups = policy(op, "metal")["simdgroups"]
    if k <= _FEW:
        width, keep = next(p for p in ((8, 1), (16, 1), (32, 1), (32, 2)) if n <= p[0] * p[1])
        share = SIMD_WIDTH // width
        rows = width * keep
        most = min(_A_TILE // (rows * (rows + 1)), _X_TILE // (rows * _FEW)) // share
        fit = min(simdgroups, most)
        return Launch(
            f"linalg/{op}.metal",
            f"{op}_rows",
            f"{width}x{keep}",
            args,
            threads=(-(-batch // (share * fit)) * fit * SIMD_WIDTH, 1, 1),
            group=(fit * SIMD_WIDTH, 1, 1),
        )
    threads = min(simdgroups * SIMD_WIDTH, round_up(k, SIMD_WIDTH))
    return Launch(
        f"linalg/{op}.metal",
        f"{op}_columns",
        "16" if n <= 16 else "32",
        args,
        threads=(round_up(k, threads), batch, 1),
        group=(threads, 1, 1),
    )


@metal_kernel("trsm")
def plan(
    _: Values, A: Tensor, B: Tensor, lower: bool, transpose: bool, unit_diagonal: bool
) -> Planned | None:
    kind = (lower, transpose, unit_diagonal)

    def solve(A: Tensor, B: Tensor, X: Tensor) -> list[Step]:
        if X.shape[-2] <= BLOCK:
            return [block("trsm", A, B, X, 0, X.shape[-2], kind)]
        blocks = steps(A, X, lower=lower, transpose=transpose, unit_diagonal=unit_diagonal)
        return [Call(X.copy_, (B,)), *blocks]

    return planned(A, B, solve)


def planned(
    A: Tensor, B: Tensor, solve: Callable[[Tensor, Tensor, Tensor], list[Step]]
) -> Planned | None:
    """`solve` for A and B of any dtype and batch: it gets them contiguous, in float32, with one
    batch dimension, and X to be written."""
    if B.dtype not in MSL_TYPE:
        return None
    n, k = B.shape[-2:]
    out = B.new_empty(B.shape)
    if B.numel() == 0:
        return [], out
    a, b = (x.float().contiguous().view(-1, *x.shape[-2:]) for x in (A, B))
    if B.dtype == torch.float32:
        return solve(a, b, out.view(-1, n, k)), out
    X = torch.empty_like(b)
    return [*solve(a, b, X), Call(out.copy_, (X.view(B.shape),))], out
