# SPDX-License-Identifier: MIT
"""Linear algebra of DoubleFloats with its gradients, and torch's names for it."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from metalcore._autograd import as_one_batch, differentiable
from metalcore._check import expect_factored, refuse
from metalcore.ops.linalg.pinv import gradient as pinv_gradient
from metalcore.ops.linalg.svd import WAY_OUT, expect_decomposed
from metalcore.ops.precise import _refinement, _spectra, double_float
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


def _eigh_forward(A: DoubleFloat, upper: bool) -> tuple[DoubleFloat, DoubleFloat, Tensor]:
    half = A.mT if upper else A
    both: Any = half.tril() + half.tril(-1).mT
    return _spectra.eigh(both)


def _values_save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *outputs, info = output
    ctx.mark_non_differentiable(info)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*outputs)


def _eigh_backward(ctx: Any, dL: Tensor | None, dQ: Tensor | None, _info: Any) -> Any:
    L, Q = ctx.saved_tensors
    # Q (diag(dL) + (Q^T dQ) / E) Q^T with E_ij = L_j - L_i off the diagonal
    inner = torch.zeros_like(Q) if dL is None else torch.diag_embed(DoubleFloat(dL))
    if dQ is not None:
        turn = Q.mT @ DoubleFloat(dQ)
        gaps = L[..., None, :] - L[..., :, None] + identity(Q)
        inner = inner + (turn - turn.mT) / (2 * gaps)
    return Q @ inner @ Q.mT, None


_eigh = differentiable(
    "double_float_eigh", _eigh_forward, _values_save, _eigh_backward, as_one_batch(_eigh_forward)
)


def _svd_forward(A: DoubleFloat) -> tuple[DoubleFloat, DoubleFloat, DoubleFloat, Tensor]:
    return _spectra.svd(A)


def _svd_backward(ctx: Any, dU: Any, dS: Any, dV: Any, _info: Any) -> Tensor:
    U, S, V = ctx.saved_tensors
    row, column = S[..., None, :], S[..., :, None]
    inner = torch.zeros_like(row * column) if dS is None else torch.diag_embed(DoubleFloat(dS))
    gaps = (row - column) * (row + column) + identity(inner)
    rest = 0.0
    if dU is not None:
        turn = U.mT @ DoubleFloat(dU)
        inner = inner + (turn - turn.mT) / gaps * row
        # what moves the space of the columns itself
        rest = (DoubleFloat(dU) - U @ turn) / row @ V.mT
    if dV is not None:
        turn = V.mT @ DoubleFloat(dV)
        inner = inner + column * ((turn - turn.mT) / gaps)
    dA: Tensor = U @ inner @ V.mT + rest
    return dA


_svd = differentiable(
    "double_float_svd", _svd_forward, _values_save, _svd_backward, as_one_batch(_svd_forward)
)


def _pinv_forward(A: DoubleFloat, rcond: Tensor, hermitian: bool) -> tuple[DoubleFloat, Tensor]:
    U: Any
    L: Any
    if hermitian:
        L, U, info = _eigh_forward(A, False)
        V = U
    else:
        U, L, V, info = _spectra.svd(A)
    sizes = L.high.abs()
    counts = sizes > rcond * _refinement.size_of(sizes[..., None])[..., 0]
    inverse = torch.where(counts, 1 / torch.where(counts, L, 1.0), 0.0)
    P: Any = (V * inverse[..., None, :]) @ U.mT
    return P, info


def _pinv_save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(inputs[0], output[0])


def _pinv_backward(ctx: Any, dP: Tensor, _info: Any) -> tuple[Tensor, None, None]:
    A, P = ctx.saved_tensors
    return pinv_gradient(A, P, DoubleFloat(dP)), None, None


_pinv = differentiable(
    "double_float_pinv", _pinv_forward, _pinv_save, _pinv_backward, as_one_batch(_pinv_forward)
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
    way_out = "A must have full rank to 48 bits here; use metalcore.pinv(A) @ B."
    expect_factored("lstsq", info, "linalg.lstsq", way_out)
    return X, left


def eigh(A: Any, upper: bool, check: bool) -> Any:
    L, Q, info = _eigh(A, upper)
    if not check:
        return L, Q, info
    expect_factored("eigh", info, "linalg.eigh", WAY_OUT)
    return L, Q


def svd(A: Any, full_matrices: bool, check: bool) -> Any:
    is_wide = A.shape[-2] < A.shape[-1]
    U, S, V, info = _svd(A.mT if is_wide else A)
    if full_matrices:
        U = torch.cat([U, _spectra.completion(U.detach())], -1)
    U, V = (V, U) if is_wide else (U, V)
    if not check:
        return U, S, V, info
    expect_decomposed("svd", A.high, info)
    return U, S, V


def pinv(A: Any, rcond: float | Tensor | None, hermitian: bool) -> Any:
    sizes = A.shape[-2:]
    is_wide = sizes[0] < sizes[1]
    limit = max(16, *sizes) * _refinement.EPS if rcond is None else rcond
    limits = torch.as_tensor(limit, dtype=torch.float32, device=A.device)[..., None]
    P, info = _pinv(A.mT if is_wide else A, limits.expand(*A.shape[:-2], 1), hermitian)
    expect_decomposed("pinv", A.high, info)
    return P.mT if is_wide else P


def trsm(A: Any, B: Any, lower: bool, transpose: bool, unit_diagonal: bool) -> Any:
    if unit_diagonal:
        A = A - torch.diag_embed(A.diagonal(dim1=-2, dim2=-1)) + identity(A)
    return triangular(A.mT if transpose else A, B, lower != transpose)


def identity(A: Any) -> DoubleFloat:
    return _refinement.identity(A.shape[-1], A.high)


def _zeros(B: Any, rows: int) -> DoubleFloat:
    return _refinement.plain(B.high.new_zeros(*B.shape[:-2], rows, B.shape[-1]))


def _by_metalcore(name: str, *dropped: str, module: str = "") -> Callable[..., Any]:
    """metalcore's function of a name; options of torch's that change nothing are dropped."""

    def call(*args: Any, **options: Any) -> Any:
        function = getattr(import_module(f"metalcore.ops.linalg.{module or name}"), name)
        return function(*args, **{k: v for k, v in options.items() if k not in dropped})

    return call


def _solve_triangular(
    A: Any, B: Any, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    trsm = _by_metalcore("trsm")
    if left:
        return trsm(A, B, lower=not upper, unit_diagonal=unitriangular)
    return trsm(A.mT, B.mT, lower=upper, unit_diagonal=unitriangular).mT


def _svd_of_torch(A: Any, full_matrices: bool = True) -> Any:
    U, S, V = _by_metalcore("svd")(A, full_matrices)
    return U, S, V.mT


def _pinv_of_torch(A: Any, *, rtol: Any = None, hermitian: bool = False) -> Any:
    return _by_metalcore("pinv")(A, rcond=rtol, hermitian=hermitian)


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.linalg.solve: _by_metalcore("solve"),
    torch.linalg.inv: _by_metalcore("inv"),
    torch.linalg.cholesky: _by_metalcore("cholesky"),
    torch.linalg.qr: _by_metalcore("qr"),
    torch.linalg.lstsq: _by_metalcore("lstsq", "driver"),
    torch.linalg.solve_triangular: _solve_triangular,
    torch.linalg.eigh: _by_metalcore("eigh"),
    torch.linalg.eigvalsh: _by_metalcore("eigvalsh", module="eigh"),
    torch.linalg.svdvals: _by_metalcore("svdvals", "driver", module="svd"),
    torch.linalg.svd: _svd_of_torch,
    torch.linalg.pinv: _pinv_of_torch,
}
