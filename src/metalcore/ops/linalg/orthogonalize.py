# SPDX-License-Identifier: MIT
"""Orthonormal columns (of wide matrices: rows) with the span of A: by QR, or the nearest ones."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from metalcore import _torch
from metalcore._accuracy import set_accuracy
from metalcore._check import expect_float, expect_matrix, expect_one_of, is_eager
from metalcore._op import Composition, Example, Op, accumulate
from metalcore.ops.linalg.qr import qr, square_gradient
from metalcore.ops.linalg.svd import svd
from metalcore.ops.linalg.tsqr import is_split_by_rows, tsqr

# Rows of a block of TSQR, at least.
_BLOCK_ROWS = 256
# Steps of the polar iteration: X <- X (a + b G + c G^2) with G = X^T X. The first ones raise small
# singular values fastest (Polar Express, arXiv 2505.16932, scaled by 1.01 against rounding), the
# last converges cubically near 1.
_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
)
_LAST = (1.875, -1.25, 0.375)
_MOST_STEPS = 60
# How often to repeat the third step so that singular values down to 2e-13 (float64: 1e-21) of the
# norm end up at 1, which further steps do not change.
_REPEATS = {torch.float32: 17, torch.float64: 30}
# Columns up to which the SVD is one kernel, and less than all these steps.
_SVD_UP_TO = 64

set_accuracy("orthogonalize", 16.0)

_by_cholesky = Op("orthogonalize(Tensor A) -> Tensor", batched=True, sharding="*MN -> *MN")
_polar = Composition("polar(Tensor A) -> Tensor", batched=True, sharding="*MN -> *MN")


def orthogonalize(A: Tensor, method: str = "auto") -> Tensor:
    """Orthonormal columns that span those of A; where A is wide, orthonormal rows.

    Q is orthonormal also where A is rank-deficient. The signs of its columns depend on the method.

    Args:
        A: [..., M, N], of any shape. Rows of a tall DTensor may be split over processes: then the
            first two methods are `tsqr`.
        method: "householder"; "tsqr", QR of blocks of rows, then of their R: for M >> N;
            "cholesky", from the Gram matrix in float64, with Householder where that fails, or in
            pairs of float32 on GPUs, with NaN where that fails, far above condition 1e8: Q is
            orthonormal to 1e-7; "polar", the nearest orthonormal matrix, see `polar`;
            "newton_schulz", the same by seven steps of products alone, up to condition 100: smaller
            singular values stay below 1; "auto", the faster one of the first two.

    Returns:
        [..., M, N].

    Example:
        >>> Q = metalcore.orthogonalize(torch.randn(1000, 10))
    """
    op = "orthogonalize"
    expect_one_of(op, "method", method, ("auto", *_METHODS))
    expect_float(op, A=A)
    expect_matrix(op, "A", A)
    if A.shape[-2] < A.shape[-1]:
        return orthogonalize(A.mT, method).mT
    if method in ("auto", "tsqr", "householder") and is_split_by_rows(A):
        return tsqr(A)[0]
    if method == "auto":
        # blocks give a GPU's threads work at once; LAPACK needs none (0.6x for 100000 x 10)
        slender = not A.is_cpu and A.shape[-2] >= 16 * max(_BLOCK_ROWS, 4 * A.shape[-1])
        method = "tsqr" if slender else "householder"
    return _METHODS[method](accumulate(A)).to(A.dtype)


def polar(A: Tensor) -> Tensor:
    """The orthonormal factor U of the polar decomposition A = U H, H symmetric and not negative.

    U is the nearest matrix to A with orthonormal columns (of wide matrices: rows).

    Args:
        A: [..., M, N], of any shape and scale.

    Returns:
        U, [..., M, N]. Its gradient exists where A has full rank.

    Example:
        >>> U = metalcore.polar(torch.randn(64, 64))
    """
    expect_float("polar", A=A)
    expect_matrix("polar", "A", A)
    if A.shape[-2] < A.shape[-1]:
        return polar(A.mT).mT
    U: Tensor = _polar(accumulate(A))
    return U.to(A.dtype)


def _householder(A: Tensor) -> Tensor:
    return qr(A)[0]


def _tsqr(A: Tensor) -> Tensor:
    m, n = A.shape[-2:]
    rows = max(_BLOCK_ROWS, 4 * n)
    blocks = -(-m // rows)
    if blocks < 2 or n == 0:
        return _householder(A)
    padded = torch.nn.functional.pad(A, (0, 0, 0, blocks * rows - m))
    Q, R = qr(padded.unflatten(-2, (blocks, rows)))
    top = _tsqr(R.flatten(-3, -2)).unflatten(-2, (blocks, n))
    joined: Tensor = Q @ top
    return joined.flatten(-3, -2)[..., :m, :]


@_by_cholesky.reference
def _(A: Tensor) -> Tensor:
    """Q of A = Q R with a positive diagonal of R; A is not wide."""
    Q, R = torch.linalg.qr(accumulate(A))
    signs = torch.where(R.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
    signed: Tensor = Q * signs[..., None, :].to(Q)
    return signed.to(A.dtype).contiguous()


@_by_cholesky.example
def _(dtype: torch.dtype) -> Example:
    A = torch.randn(2, 45, 20) + 3 * torch.eye(45, 20)
    return Example((A.to(dtype),), reduces_over=45)


@_by_cholesky.example
def _(dtype: torch.dtype) -> Example:
    A = torch.randn(1, 70, 35) + 3 * torch.eye(70, 35)
    return Example((A.to(dtype),), reduces_over=70)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


@_by_cholesky.gradient(save=_save)
def _(ctx: Any, dQ: Tensor) -> Tensor:
    saved = ctx.saved_tensors
    A, Q, dQ = (accumulate(x) for x in (*saved, dQ))
    R = (Q.mT @ A).triu()
    dA = square_gradient(Q, R, dQ, torch.zeros_like(R))
    return dA.to(saved[0].dtype)


@_polar.forward
def _(A: Tensor) -> Tensor:
    if A.numel() == 0:
        return A.clone()
    # the simulator is for what runs on a GPU
    if A.is_cpu and is_eager() and not _torch.has_dispatch_mode():
        return _polar_to_tolerance(A)
    if A.shape[-1] <= _SVD_UP_TO:
        W, _, V, _ = svd(A, check=False)
        U: Tensor = W @ V.mT
        return U
    return _polar_in_all_steps(A)


@_polar.reference
def _(A: Tensor) -> Tensor:
    W, _, Vh = torch.linalg.svd(A, full_matrices=False)
    U: Tensor = W @ Vh
    return U


@_polar.example
def _(dtype: torch.dtype) -> Example:
    return Example(((torch.randn(2, 7, 5) + 3 * torch.eye(7, 5)).to(dtype),), reduces_over=7)


@_polar.gradient(save=_save)
def _(ctx: Any, dU: Tensor) -> Tensor:
    A, U = ctx.saved_tensors
    S, V = torch.linalg.eigh(_symmetric(U.mT @ A))
    inner = U.mT @ dU
    skew = V.mT @ (inner - inner.mT) @ V / (S[..., :, None] + S[..., None, :])
    outside = dU - U @ inner
    dA: Tensor = U @ (V @ skew @ V.mT) + (outside @ V / S[..., None, :]) @ V.mT
    return dA


def _symmetric(A: Tensor) -> Tensor:
    return (A + A.mT) / 2


def _triangle(A: Tensor) -> tuple[Tensor, Tensor]:
    """Q R = A but for a factor: products alone find the polar factor of R, and Q that of A."""
    largest = A.abs().amax((-2, -1), keepdim=True)
    # a zero matrix stays one
    return qr(A / torch.where(largest == 0, 1.0, largest))


def _step(X: Tensor, G: Tensor, coefficients: tuple[float, float, float], damped: float) -> Tensor:
    """`damped`: against singular values that rounding lifts above 1."""
    a, b, c = coefficients
    eye = torch.eye(X.shape[-1], dtype=X.dtype, device=X.device)
    return X @ (a / damped * eye + b / damped**3 * G + c / damped**5 * (G @ G))


def _noise(X: Tensor) -> Tensor:
    """Values in -1 to 1, the same for each size, by the finaliser of MurmurHash3."""
    n = X.shape[-1]
    bits = torch.arange(1, n * n + 1, device=X.device)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = ((bits ^ (bits >> shift)) * factor) & 0xFFFFFFFF
    return ((bits ^ (bits >> 16)).to(X.dtype) / 2**31 - 1).view(n, n)


def _polar_in_all_steps(A: Tensor) -> Tensor:
    """With as many steps as any matrix needs, so that nothing waits for the device."""
    Q, R = _triangle(A)
    # noise of the size of rounding: singular values that are zero would stay behind
    size = torch.linalg.matrix_norm(R, keepdim=True).clamp_min(1.0)
    X = R + torch.finfo(A.dtype).eps / R.shape[-1] ** 0.5 * size * _noise(R)
    X = X / (1.01 * torch.linalg.matrix_norm(X, keepdim=True))
    repeats = [_EXPRESS[2]] * (_REPEATS[A.dtype] - 1)
    for coefficients in (*_EXPRESS[:2], *repeats, *_EXPRESS[2:]):
        X = _step(X, X.mT @ X, coefficients, 1.01)
    for _ in range(3):
        X = _step(X, X.mT @ X, _LAST, 1.0)
    U: Tensor = Q @ X
    return U


def _polar_to_tolerance(A: Tensor) -> Tensor:
    """With as many steps as A needs, and the SVD where they leave a singular value behind."""
    Q, R = _triangle(A)
    X = R / (1.01 * torch.linalg.matrix_norm(R, keepdim=True)).clamp_min(1e-30)
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    allowed = 4 * torch.finfo(A.dtype).eps * A.shape[-1] ** 0.5
    off = torch.full(A.shape[:-2], torch.inf, dtype=A.dtype, device=A.device)
    for step in range(_MOST_STEPS):
        G = X.mT @ X
        off = torch.linalg.matrix_norm(G - eye)
        if step > len(_EXPRESS) and bool((off <= allowed).all()):
            break
        early = step < len(_EXPRESS)
        X = _step(X, G, _EXPRESS[step] if early else _LAST, 1.01 if early else 1.0)
    left = ~(off <= allowed)
    if left.any():
        W, _, Vh = torch.linalg.svd(R[left].nan_to_num(), full_matrices=False)
        X[left] = (W @ Vh).where(R[left].isfinite().all(), torch.nan)
    U: Tensor = Q @ X
    return U


def _newton_schulz(A: Tensor) -> Tensor:
    # twice, because the norm of large numbers is infinite
    X = A / A.abs().amax((-2, -1), keepdim=True).clamp_min(torch.finfo(A.dtype).tiny)
    X = X / (1.01 * torch.linalg.matrix_norm(X, keepdim=True)).clamp_min(1.0)
    for coefficients in _EXPRESS:
        X = _step(X, X.mT @ X, coefficients, 1.01)
    return _step(X, X.mT @ X, _LAST, 1.0)


_METHODS: dict[str, Callable[[Tensor], Tensor]] = {
    "householder": _householder,
    "tsqr": _tsqr,
    "cholesky": _by_cholesky,
    "polar": polar,
    "newton_schulz": _newton_schulz,
}
