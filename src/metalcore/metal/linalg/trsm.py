# SPDX-License-Identifier: MIT
"""Launches of trsm."""

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

FILE = "linalg/trsm.metal"

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
        todo.append(_block(A, X, X, start, stop, (lower, transpose, unit_diagonal)))
        rest = slice(stop, n) if lower != transpose else slice(0, start)
        if X[:, rest].numel():
            left = A[:, start:stop, rest].mT if transpose else A[:, rest, start:stop]
            todo.append(Call(X[:, rest].baddbmm_, (left, X[:, start:stop]), {"alpha": -1}))
    return todo


def _block(
    A: Tensor, B: Tensor, X: Tensor, start: int, stop: int, kind: tuple[bool, bool, bool]
) -> Launch:
    """The launch for rows `start` to `stop`, whose block of A stands on its diagonal."""
    batch, order, k = X.shape
    n = stop - start
    where = (start * (order + 1), order, order * order, start * k, order * k, *map(int, kind))
    simdgroups = policy("trsm", "metal")["simdgroups"]
    if k <= _FEW:
        width, keep = next(p for p in ((8, 1), (16, 1), (32, 1), (32, 2)) if n <= p[0] * p[1])
        share = SIMD_WIDTH // width
        rows = width * keep
        most = min(_A_TILE // (rows * (rows + 1)), _X_TILE // (rows * _FEW)) // share
        fit = min(simdgroups, most)
        groups = -(-batch // (share * fit))
        return Launch(
            FILE,
            "trsm_rows",
            f"{width}x{keep}",
            (A, B, X, batch, n, k, *where),
            threads=(groups * fit * SIMD_WIDTH, 1, 1),
            group=(fit * SIMD_WIDTH, 1, 1),
        )
    rows = next(r for r in (16, 32, 64) if n <= r)
    threads = min(simdgroups * SIMD_WIDTH, round_up(k, SIMD_WIDTH))
    return Launch(
        FILE,
        "trsm_columns",
        f"{rows}",
        (A, B, X, n, k, *where),
        threads=(round_up(k, threads), batch, 1),
        group=(threads, 1, 1),
    )


@metal_kernel("trsm")
def plan(
    _: Values, A: Tensor, B: Tensor, lower: bool, transpose: bool, unit_diagonal: bool
) -> Planned | None:
    if B.dtype not in MSL_TYPE:
        return None
    shape, dtype = B.shape, B.dtype
    n = shape[-2]
    if B.numel() == 0:
        return [], torch.empty_like(B, memory_format=torch.contiguous_format)
    A = A.float().contiguous().view(-1, n, n)
    B = B.float().contiguous().view(-1, n, shape[-1])
    X = torch.empty_like(B)
    if n <= BLOCK:
        todo: list[Step] = [_block(A, B, X, 0, n, (lower, transpose, unit_diagonal))]
    else:
        todo = [Call(X.copy_, (B,))]
        todo += steps(A, X, lower=lower, transpose=transpose, unit_diagonal=unit_diagonal)
    if dtype == torch.float32:
        return todo, X.view(shape)
    rounded = X.new_empty(shape, dtype=dtype)
    return [*todo, Call(rounded.copy_, (X.view(shape),))], rounded
