# SPDX-License-Identifier: MIT
"""Linear algebra of DoubleFloats with its gradients, and torch's names for it."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from metalcore._autograd import as_one_batch, differentiable
from metalcore._check import expect_factored, refuse
from metalcore.ops.precise import _refinement, double_float
from metalcore.ops.precise.double_float import DoubleFloat

# Arguments are DoubleFloats of one batch, [..., M, N]; all is checked.


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *outputs, info = output
    ctx.mark_non_differentiable(info)
    ctx.save_for_backward(*inputs, *outputs)


def _solve_forward(A: DoubleFloat, B: DoubleFloat) -> tuple[DoubleFloat, Tensor]:
    return _refinement.solve(A, B)


def _solve_backward(ctx: Any, dX: Tensor, _info: Any) -> tuple[Tensor, Tensor]:
    A, _, X = ctx.saved_tensors
    dB = _solve(A.mT, DoubleFloat(dX))[0]
    return -(dB @ X.mT), dB


_solve = differentiable(
    "double_float_solve", _solve_forward, _save, _solve_backward, as_one_batch(_solve_forward)
)


def _triangular_save(ctx: Any, inputs: tuple[Any, ...], output: DoubleFloat) -> None:
    A, _, ctx.lower = inputs
    ctx.save_for_backward(A, output)


def _triangular_forward(A: DoubleFloat, B: DoubleFloat, lower: bool) -> DoubleFloat:
    return double_float.triangular(A, B, lower)


def _triangular_backward(ctx: Any, dX: Tensor) -> tuple[Tensor, Tensor, None]:
    A, X = ctx.saved_tensors
    dB = triangular(A.mT, DoubleFloat(dX), not ctx.lower)
    dA = -(dB @ X.mT)
    return dA.tril() if ctx.lower else dA.triu(), dB, None


triangular = differentiable(
    "double_float_triangular",
    _triangular_forward,
    _triangular_save,
    _triangular_backward,
    as_one_batch(_triangular_forward),
)
"""triangular(A, B, lower): X with A X = B."""


def _cholesky_forward(A: DoubleFloat) -> tuple[DoubleFloat, Tensor]:
    both: Any = A.tril() + A.tril(-1).mT
    return _refinement.cholesky(both)


def _cholesky_backward(ctx: Any, dL: Tensor, _info: Any) -> Tensor:
    _, L = ctx.saved_tensors
    # dA = L^-T sym(tril(L^T dL) with half its diagonal) L^-1
    inner = (L.mT @ DoubleFloat(dL)).tril()
    inner = inner + inner.tril(-1).mT
    half = triangular(L.mT, inner, False)
    dA: Tensor = triangular(L.mT, half.mT, False) / 2
    return dA


_cholesky = differentiable(
    "double_float_cholesky",
    _cholesky_forward,
    _save,
    _cholesky_backward,
    as_one_batch(_cholesky_forward),
)


def _qr_forward(A: DoubleFloat) -> tuple[DoubleFloat, DoubleFloat, Tensor]:
    Q, R, is_orthonormal = _refinement.qr(A)
    return Q, R, torch.where(is_orthonormal[..., 0, 0], 0, 1).int()


def _qr_backward(ctx: Any, dQ: Tensor, dR: Tensor, _info: Any) -> Tensor:
    _, Q, R = ctx.saved_tensors
    # (dQ + Q sym(M)) R^-T with M = triu(dR R^T - Q^T dQ), sym(M) = M + M^T - diag(M)
    dQ, dR = DoubleFloat(dQ), DoubleFloat(dR)
    M = (dR @ R.mT - Q.mT @ dQ).triu()
    inner = dQ + Q @ (M + M.triu(1).mT)
    dA: Tensor = triangular(R, inner.mT, False).mT
    return dA


_qr = differentiable("double_float_qr", _qr_forward, _save, _qr_backward, as_one_batch(_qr_forward))


def _augmented_forward(
    A: DoubleFloat, b: DoubleFloat, c: DoubleFloat
) -> tuple[DoubleFloat, DoubleFloat, Tensor]:
    return _refinement.augmented(A, b, c)


def _augmented_backward(ctx: Any, dr: Tensor, dx: Tensor, _info: Any) -> tuple[Tensor, ...]:
    A, _, _, r, x = ctx.saved_tensors
    # the matrix of both equations is symmetric
    p, q, _ = _augmented(A, DoubleFloat(dr), DoubleFloat(dx))
    return -(p @ x.mT + r @ q.mT), p, q


_augmented = differentiable(
    "double_float_augmented",
    _augmented_forward,
    _save,
    _augmented_backward,
    as_one_batch(_augmented_forward),
)


def solve(op: str, A: Any, B: Any, check: bool) -> Any:
    X, info = _solve(A, B)
    if not check:
        return X, info
    expect_factored(op, info, "linalg.solve", "Use metalcore.lstsq or metalcore.pinv.")
    return X


def cholesky(A: Any, upper: bool, check: bool) -> Any:
    L, info = _cholesky(A.mT if upper else A)
    factor = L.mT if upper else L
    if not check:
        return factor, info
    expect_factored("cholesky", info, "linalg.cholesky", "Add a multiple of the identity to A.")
    return factor


def qr(A: Any, mode: str) -> tuple[Any, Any]:
    m, n = A.shape[-2:]
    if mode == "complete" and m > n:
        refuse("qr", 'in precision="float64" on this device, mode must be "reduced" or "r"')
    Q, R, info = _qr(A[..., : min(m, n)])
    way_out = "Columns of A depend on each other to 48 bits: use metalcore.svd."
    expect_factored("qr", info, "linalg.eigh", way_out)
    if m < n:
        R = torch.cat([R, Q.mT @ A[..., m:]], -1)
    return (R.high.new_empty(0) if mode == "r" else Q), R


def lstsq(A: Any, B: Any) -> tuple[Any, Any]:
    """X [..., N, K] for A of full rank, and what is left, B - A X."""
    m, n = A.shape[-2:]
    if m >= n:
        left, X, info = _augmented(A, B, _zeros(B, n))
    else:
        X, _, info = _augmented(A.mT, _zeros(B, n), B)
        left = _zeros(B, m)
    way_out = "A must have full rank to 48 bits here; use metalcore.lstsq without precision."
    expect_factored("lstsq", info, "linalg.lstsq", way_out)
    return X, left


def trsm(A: Any, B: Any, lower: bool, transpose: bool, unit_diagonal: bool) -> Any:
    if unit_diagonal:
        A = A - torch.diag_embed(A.diagonal(dim1=-2, dim2=-1)) + identity(A)
    return triangular(A.mT if transpose else A, B, lower != transpose)


def identity(A: Any) -> DoubleFloat:
    return _refinement.identity(A.shape[-1], A.high)


def _zeros(B: Any, rows: int) -> DoubleFloat:
    return _refinement.plain(B.high.new_zeros(*B.shape[:-2], rows, B.shape[-1]))


def _by_metalcore(name: str, *dropped: str) -> Callable[..., Any]:
    """metalcore's function of a name; options of torch's that change nothing are dropped."""

    def call(*args: Any, **options: Any) -> Any:
        function = getattr(import_module(f"metalcore.ops.linalg.{name}"), name)
        return function(*args, **{k: v for k, v in options.items() if k not in dropped})

    return call


def _solve_triangular(
    A: Any, B: Any, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    trsm = _by_metalcore("trsm")
    if left:
        return trsm(A, B, lower=not upper, unit_diagonal=unitriangular)
    return trsm(A.mT, B.mT, lower=upper, unit_diagonal=unitriangular).mT


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.linalg.solve: _by_metalcore("solve"),
    torch.linalg.inv: _by_metalcore("inv"),
    torch.linalg.cholesky: _by_metalcore("cholesky"),
    torch.linalg.qr: _by_metalcore("qr"),
    torch.linalg.lstsq: _by_metalcore("lstsq", "driver"),
    torch.linalg.solve_triangular: _solve_triangular,
}
