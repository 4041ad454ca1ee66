# SPDX-License-Identifier: MIT
"""Launches of qr."""

from typing import NamedTuple

import torch
from torch import Tensor

from metalcore._policy import Values
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

FILE = "linalg/qr.metal"

# Columns that qr_panel factors at once.
PANEL = 32
# What the threadgroup memory of qr_threadgroup holds: reflectors, columns, values.
_REFLECTORS, _COLUMNS, _VALUES = 64, 256, 7680


class Panel(NamedTuple):
    """Reflectors `first`.. of a matrix: I - V T V^T on its rows from `first` on."""

    first: int
    V: Tensor
    T: Tensor


@metal_kernel("qr")
def plan(policy: Values, A: Tensor, mode: str) -> Planned | None:
    if A.dtype not in MSL_TYPE:
        return None
    *batch, m, n = A.shape
    steps = min(m, n)
    q_columns = {"reduced": steps, "complete": m, "r": 0}[mode]
    r_rows = m if mode == "complete" else steps
    Q = A.new_empty((*batch, m, q_columns), dtype=torch.float32)
    R = A.new_empty((*batch, r_rows, n), dtype=torch.float32)
    if A.numel() == 0:
        Q.copy_(torch.eye(m, q_columns))
        return [], (Q.to(A.dtype), R.to(A.dtype))
    a, r = A.float().contiguous().view(-1, m, n), R.view(-1, r_rows, n)
    q = Q.view(a.shape[0], m, q_columns)
    if max(m, n) <= SIMD_WIDTH:
        todo: list[Step] = [_simdgroup(policy, a, q, r)]
    elif (
        steps <= _REFLECTORS
        and max(n, q_columns) <= _COLUMNS
        and m * (max(n, q_columns) | 1) <= _VALUES
    ):
        threads = policy["threads"]
        todo = [
            Launch(
                FILE,
                "qr_threadgroup",
                f"{_COLUMNS}",
                (a, q, r, m, n, q_columns, r_rows),
                threads=(a.shape[0] * threads, 1, 1),
                group=(threads, 1, 1),
            )
        ]
    else:
        todo = _blocked(policy, a, q, r)
    return _rounded(todo, (Q, R), A.dtype)


def _rounded(todo: list[Step], outputs: tuple[Tensor, ...], dtype: torch.dtype) -> Planned:
    if dtype == torch.float32:
        return todo, outputs
    rounded = tuple(torch.empty_like(x, dtype=dtype) for x in outputs)
    copies = [Call(y.copy_, (x,)) for x, y in zip(outputs, rounded, strict=True)]
    return [*todo, *copies], rounded


def _simdgroup(policy: Values, A: Tensor, Q: Tensor, R: Tensor) -> Launch:
    matrices, m, n = A.shape
    size = next(s for s in (8, 16, 32) if max(m, n) <= s)
    simdgroups = -(-matrices * size // SIMD_WIDTH)
    group = SIMD_WIDTH * min(policy["simdgroups"], simdgroups)
    return Launch(
        FILE,
        "qr_simdgroup",
        f"{size}",
        (A, Q, R, matrices, m, n, Q.shape[-1], R.shape[-2]),
        threads=(round_up(simdgroups * SIMD_WIDTH, group), 1, 1),
        group=(group, 1, 1),
    )


def _blocked(policy: Values, A: Tensor, Q: Tensor, R: Tensor) -> list[Step]:
    batch, m, n = A.shape
    W, scales = torch.empty_like(A), A.new_empty(batch, n)
    threads = min(policy["panel_threads"], SIMD_WIDTH * -(-m // policy["rows_per_simdgroup"]))
    todo: list[Step] = [
        Launch(
            FILE,
            "qr_scale",
            f"{PANEL}",
            (A, W, scales, m, n),
            threads=(-(-n // PANEL) * threads, batch, 1),
            group=(threads, 1, 1),
        )
    ]
    panels = [_panel(todo, W, first, min(m, n), threads) for first in range(0, min(m, n), PANEL)]
    todo.append(Call(torch.triu, (W[:, : R.shape[-2]],), {"out": R}))
    todo.append(Call(R.div_, (scales[:, None],)))
    if Q.shape[-1]:
        todo.append(Call(Q.copy_, (torch.eye(*Q.shape[1:], device=Q.device),)))
        for panel in reversed(panels):
            todo += _apply(panel, panel.T, Q[:, panel.first :, panel.first :])
    return todo


def _panel(todo: list[Step], W: Tensor, first: int, steps: int, threads: int) -> Panel:
    """Factors the columns from `first` on and applies their reflectors to those after them."""
    batch, m, n = W.shape
    width = min(PANEL, steps - first)
    panel = Panel(first, W.new_empty(batch, m - first, width), W.new_empty(batch, width, width))
    todo.append(
        Launch(
            FILE,
            "qr_panel",
            f"{PANEL}",
            (W, panel.V, panel.T, m, n, first, width),
            threads=(batch * threads, 1, 1),
            group=(threads, 1, 1),
        )
    )
    if first + width < n:
        todo += _apply(panel, panel.T.mT, W[:, first:, first + width :])
    return panel


def _apply(panel: Panel, T: Tensor, X: Tensor) -> list[Step]:
    """X - V T V^T X, in place."""
    batch, width = X.shape[0], panel.T.shape[-1]
    projected, pulled = (X.new_empty(batch, width, X.shape[-1]) for _ in range(2))
    return [
        Call(torch.bmm, (panel.V.mT, X), {"out": projected}),
        Call(torch.bmm, (T, projected), {"out": pulled}),
        Call(X.baddbmm_, (panel.V, pulled), {"alpha": -1}),
    ]
