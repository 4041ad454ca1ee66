# SPDX-License-Identifier: MIT
"""Programs of qr."""

from typing import NamedTuple

from metalcore._policy import policy
from metalcore.metal.linalg._matrices import matrices
from metalcore.metal.plans import metal_kernel
from metalcore.metal.program import SIMD_WIDTH, Arguments, Buffer, Program, round_up

FILE = "linalg/qr.metal"

# Columns that qr_panel factors at once.
PANEL = 32
# What the threadgroup memory of qr_threadgroup holds: values, columns, reflectors.
_VALUES, _COLUMNS, _REFLECTORS = 7680, 256, 64


class Panel(NamedTuple):
    """Reflectors `first`.. of a matrix: I - V T V^T on its rows from `first` on."""

    first: int
    V: Buffer
    T: Buffer


@metal_kernel("qr")
def plan(p: Program, a: Arguments) -> tuple[Buffer, Buffer]:
    return factor(p, a.A, a.mode)


def factor(p: Program, A: Buffer, mode: str) -> tuple[Buffer, Buffer]:
    """Q and R of A, for the program of any op."""
    *batch, m, n = A.shape
    steps = min(m, n)
    q_columns = {"reduced": steps, "complete": m, "r": 0}[mode]
    r_rows = m if mode == "complete" else steps
    Q, R = p.new((*batch, m, q_columns)), p.new((*batch, r_rows, n))
    if A.numel == 0:
        p.identity(Q)
        return p.rounded(Q, A.dtype), p.rounded(R, A.dtype)
    a = matrices(p, A)
    q, r = Q.view(a.shape[0], m, q_columns), R.view(a.shape[0], r_rows, n)
    columns = max(n, q_columns)
    if max(m, n) <= SIMD_WIDTH:
        _simdgroup(p, a, q, r)
    elif steps <= _REFLECTORS and columns <= _COLUMNS and m * (columns | 1) <= _VALUES:
        threads = policy("qr", "metal")["threads"]
        args = (a, q, r, m, n, q_columns, r_rows)
        variant = (_VALUES, _COLUMNS, _REFLECTORS)
        p.launch(FILE, "qr_threadgroup", variant, args, a.shape[0] * threads, threads)
    else:
        _blocked(p, a, q, r)
    return p.rounded(Q, A.dtype), p.rounded(R, A.dtype)


def _simdgroup(p: Program, A: Buffer, Q: Buffer, R: Buffer) -> None:
    matrices, m, n = A.shape
    size = next(s for s in (8, 16, 32) if max(m, n) <= s)
    most = policy("qr", "metal")["simdgroups"]
    simdgroups = -(-matrices * size // SIMD_WIDTH)
    group = SIMD_WIDTH * min(most, simdgroups)
    args = (A, Q, R, matrices, m, n, Q.shape[-1], R.shape[-2])
    threads = round_up(simdgroups * SIMD_WIDTH, group)
    p.launch(FILE, "qr_simdgroup", (size, most), args, threads, group)


def _blocked(p: Program, A: Buffer, Q: Buffer, R: Buffer) -> None:
    batch, m, n = A.shape
    values = policy("qr", "metal")
    W, scales = p.new_like(A), p.new((batch, n))
    threads = min(values["panel_threads"], SIMD_WIDTH * -(-m // values["rows_per_simdgroup"]))
    grid, group = (-(-n // PANEL) * threads, batch, 1), (threads, 1, 1)
    p.launch(FILE, "qr_scale", (PANEL,), (A, W, scales, m, n), grid, group)
    panels = [_panel(p, W, first, min(m, n), threads) for first in range(0, min(m, n), PANEL)]
    width = min(values["threads"], round_up(n, SIMD_WIDTH))
    grid = (round_up(n, width), R.shape[-2], batch)
    p.launch(FILE, "qr_finish", (), (W, scales, R, m, R.shape[-2], n), grid, width)
    if Q.shape[-1]:
        p.identity(Q)
        for panel in reversed(panels):
            _apply(p, panel, panel.T, Q[:, panel.first :, panel.first :])


def _panel(p: Program, W: Buffer, first: int, steps: int, threads: int) -> Panel:
    """Factors the columns from `first` on and applies their reflectors to those after them."""
    batch, m, n = W.shape
    width = min(PANEL, steps - first)
    panel = Panel(first, p.new((batch, m - first, width)), p.new((batch, width, width)))
    args = (W, W, panel.V, panel.T, m, n, first, width)
    p.launch(FILE, "qr_panel", (PANEL,), args, batch * threads, threads)
    if first + width < n:
        _apply(p, panel, panel.T.mT, W[:, first:, first + width :])
    return panel


def _apply(p: Program, panel: Panel, T: Buffer, X: Buffer) -> None:
    """X - V T V^T X, in place."""
    shape = (X.shape[0], panel.T.shape[-1], X.shape[-1])
    projected, pulled = p.new(shape), p.new(shape)
    p.matmul(projected, panel.V.mT, X)
    p.matmul(pulled, T, projected)
    p.matmul(X, panel.V, pulled, alpha=-1.0, beta=1.0)
