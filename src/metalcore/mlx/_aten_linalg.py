# SPDX-License-Identifier: MIT
"""torch's linear algebra in MLX: by our kernels where they run, else by MLX's own, which the CPU
has. Both work on the memory of a GPU."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import torch
from torch import fx

aten = torch.ops.aten


def _by_trsm(
    kernels: Any, node: fx.Node, a: mx.array, b: mx.array, *, upper: bool, left: bool = True,
    unitriangular: bool = False,
) -> mx.array:  # fmt: skip
    if not left:
        a, b = mx.swapaxes(a, -1, -2), mx.swapaxes(b, -1, -2)
    batch = mx.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (mx.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, b))
    x = kernels("trsm", (a, b, upper != left, False, unitriangular), node.meta["val"])
    return x if left else mx.swapaxes(x, -1, -2)


def _by_eigh(kernels: Any, node: fx.Node, a: mx.array, *_: Any, **__: Any) -> Any:
    return kernels("eigh", (a, False), (None,) * 3)[:2]


def _on_cpu(function: Callable[..., Any], x: mx.array, *args: Any, **named: Any) -> Any:
    """MLX's linear algebra, which the CPU has, in float32 at least."""
    return function(x, *args, **named, stream=mx.cpu)


def _no_info(x: mx.array) -> mx.array:
    return mx.zeros(x.shape[:-2], mx.int32)


def _cholesky(a: mx.array, *, upper: bool = False, **_: Any) -> tuple[mx.array, mx.array]:
    return _on_cpu(mx.linalg.cholesky, a, upper), _no_info(a)


def _cholesky_solve(b: mx.array, L: mx.array, upper: bool = False) -> mx.array:
    lower = mx.swapaxes(L, -1, -2) if upper else L
    lower = mx.broadcast_to(lower, (*b.shape[:-2], *lower.shape[-2:]))
    y = _on_cpu(mx.linalg.solve_triangular, mx.tril(lower), b, upper=False)
    return _on_cpu(mx.linalg.solve_triangular, mx.swapaxes(mx.tril(lower), -1, -2), y, upper=True)


def _triangular(
    a: mx.array, b: mx.array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> mx.array:
    if not left:
        a, b = mx.swapaxes(a, -1, -2), mx.swapaxes(b, -1, -2)
    batch = mx.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (mx.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, b))
    upper = upper == left
    a = mx.triu(a) if upper else mx.tril(a)
    if unitriangular:
        eye = mx.eye(a.shape[-1], dtype=a.dtype)
        a = a * (1 - eye) + eye
    x = _on_cpu(mx.linalg.solve_triangular, a, b, upper=upper)
    return x if left else mx.swapaxes(x, -1, -2)


def _solve(a: mx.array, b: mx.array, *, left: bool = True, **_: Any) -> tuple[mx.array, ...]:
    assert left
    return _on_cpu(mx.linalg.solve, a, b), a, _no_info(a), _no_info(a)


def _lu(a: mx.array, **_: Any) -> tuple[mx.array, mx.array, mx.array]:
    rows, lower, upper = _on_cpu(mx.linalg.lu, a)
    # row i of A is row rows[i] of LU
    permutation = rows[..., :, None] == mx.arange(a.shape[-2], dtype=rows.dtype)
    return permutation.astype(a.dtype), lower, upper


def _slogdet(a: mx.array) -> tuple[mx.array, ...]:
    permutation, lower, upper = _lu(a)
    diagonal = mx.diagonal(upper, 0, -2, -1)
    # the sign of a permutation: -1 for every pair that is out of order
    rows = mx.argmax(permutation, -1)
    pairs = mx.triu((rows[..., :, None] > rows[..., None, :]).astype(mx.int32), 1)
    odd = mx.sum(pairs, (-2, -1)) % 2
    sign = mx.prod(mx.sign(diagonal), -1) * (1 - 2 * odd).astype(a.dtype)
    return sign, mx.sum(mx.log(mx.abs(diagonal)), -1), lower, rows


def _det(a: mx.array) -> tuple[mx.array, ...]:
    sign, log, lower, rows = _slogdet(a)
    return sign * mx.exp(log), lower, rows


def _qr(a: mx.array, mode: str = "reduced") -> tuple[mx.array, mx.array]:
    m, n = a.shape[-2:]
    if mode == "complete" and m > n:
        # the columns that are missing follow from any matrix that has these first
        a = mx.concatenate([a, mx.broadcast_to(mx.eye(m, dtype=a.dtype), (*a.shape[:-1], m))], -1)
    q, r = _on_cpu(mx.linalg.qr, a)
    if mode == "complete" and m > n:
        q, r = q[..., :m], r[..., :m, :n]
    return q, r


def _svd(
    a: mx.array, full_matrices: bool = False, compute_uv: bool = True, **_: Any
) -> tuple[mx.array, ...]:
    if not compute_uv:
        s = _on_cpu(mx.linalg.svd, a, compute_uv=False)
        return mx.zeros((0,), a.dtype), s, mx.zeros((0,), a.dtype)
    u, s, v = _on_cpu(mx.linalg.svd, a)
    k = min(a.shape[-2:])
    return (u, s, v) if full_matrices else (u[..., :, :k], s, v[..., :k, :])


def _eigh(a: mx.array, uplo: str = "L", compute_v: bool = True) -> tuple[mx.array, ...]:
    return _on_cpu(mx.linalg.eigh, a, uplo)


TABLE: dict[Any, Callable[..., Any]] = {
    aten.linalg_cholesky_ex: _cholesky,
    aten.cholesky_solve: _cholesky_solve,
    aten.linalg_solve_triangular: _triangular,
    aten._linalg_solve_ex: _solve,
    aten.linalg_lu: _lu,
    aten._linalg_slogdet: _slogdet,
    aten._linalg_det: _det,
    aten.linalg_qr: _qr,
    aten._linalg_svd: _svd,
    aten._linalg_eigh: _eigh,
}

OURS: dict[Any, Callable[..., Any]] = {
    aten.linalg_solve_triangular.default: _by_trsm,
    aten._linalg_eigh.default: _by_eigh,
}
"""What has a kernel of ours, and none of MLX on a GPU."""
