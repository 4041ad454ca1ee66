# SPDX-License-Identifier: MIT
"""Programs of products with packed weights [N, K], which kernels read where they are."""

from collections.abc import Sequence
from typing import NamedTuple

from metalcore.metal.program import MSL_TYPE, Buffer, Program, Value

# of `packed_product.h`
_COLUMNS, _FEW_THREADS, _MANY_THREADS = 64, 64, 128


def columns_held(M: int) -> int:
    """Rows of x that a kernel for few of them is made for."""
    return next(n for n in (1, 2, 4, 8) if n >= M)


class Weight(NamedTuple):
    """A kernel file's name for a kind of weights, its template arguments, and its buffers."""

    file: str
    name: str
    variant: tuple[str | int, ...]
    buffers: tuple[Buffer, ...]
    sizes: tuple[int, int]
    numbers: tuple[Value, ...] = ()


def aligned(p: Program, x: Buffer) -> Buffer:
    """`x` as it is, or a copy that starts at a whole word."""
    x = p.dense(x)
    return x if x.is_aligned else p.copy(p.new_like(x), x)


def product(p: Program, x: Buffer, w: Weight) -> Buffer:
    """x W^T."""
    N, K = w.sizes
    y = p.new((*x.shape[:-1], N), x.dtype)
    if K == 0:
        return p.fill(y, 0.0)
    M = x.numel // K
    if p.policy["most_rows"] < M:
        _many(p, x, w, y, M, N, turned=False)
    elif y.numel:
        held = columns_held(M)
        groups = -(-N // (_FEW_THREADS // 32 * (4 if held <= 2 else 2 if held <= 4 else 1)))
        variant = (MSL_TYPE[x.dtype], *w.variant, held)
        args = (x, *w.buffers, y, M, N, K, *w.numbers)
        threads = groups * _FEW_THREADS
        p.launch(w.file, f"{w.name}_few", variant, args, threads, _FEW_THREADS)
    return y


def gradient(p: Program, dy: Buffer, w: Weight) -> Buffer:
    """dy W."""
    N, K = w.sizes
    dx = p.new((*dy.shape[:-1], K), dy.dtype)
    if N == 0:
        return p.fill(dx, 0.0)
    _many(p, dy, w, dx, dy.numel // N, K, turned=True)
    return dx


def _many(
    p: Program, x: Buffer, w: Weight, y: Buffer, M: int, columns: int, *, turned: bool
) -> None:
    if not y.numel:
        return
    rows = 32 if M <= 32 else 64
    variant: Sequence[str | int] = (MSL_TYPE[x.dtype], *w.variant, rows, turned)
    threads = (-(-columns // _COLUMNS) * _MANY_THREADS, -(-M // rows), 1)
    args = (x, *w.buffers, y, M, *w.sizes, *w.numbers)
    p.launch(w.file, f"{w.name}_many", variant, args, threads, (_MANY_THREADS, 1, 1))
