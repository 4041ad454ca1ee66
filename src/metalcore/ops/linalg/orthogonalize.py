# SPDX-License-Identifier: MIT
"""Orthonormal columns (of wide matrices: rows) with the span of A: by QR, or the nearest ones."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from metalcore._check import expect_float, expect_matrix, expect_one_of
from metalcore._op import accumulate
from metalcore._trace import is_eager, left_to_torch
from metalcore.ops.linalg.qr import qr, torch_is_ahead

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


def orthogonalize(A: Tensor, method: str = "auto") -> Tensor:
    """Orthonormal columns that span those of A; where A is wide, orthonormal rows.

    Q is orthonormal also where A is rank-deficient. The signs of its columns depend on the method.

    Args:
        A: [..., M, N], of any shape.
        method: "householder"; "tsqr", QR of blocks of rows, then of their R: for M >> N;
            "cholesky", twice from the float64 Gram matrix, with Householder where that fails: Q is
            orthonormal to 1e-7; "polar", the nearest orthonormal matrix, see `polar`; "auto",
            the faster one of the first two.

    Returns:
        [..., M, N].

    Example:
        >>> Q = metalcore.orthogonalize(torch.randn(1000, 10))
    """
    if method == "auto" and torch_is_ahead(A, "reduced") and left_to_torch("orthogonalize", A):
        wide = A.shape[-2] < A.shape[-1]
        Q: Tensor = torch.linalg.qr(A.mT if wide else A)[0]
        return Q.mT if wide else Q
    op = "orthogonalize"
    expect_one_of(op, "method", method, ("auto", *_METHODS))
    expect_float(op, A=A)
    expect_matrix(op, "A", A)
    if A.shape[-2] < A.shape[-1]:
        return orthogonalize(A.mT, method).mT
    if method == "auto":
        # blocks give a GPU's threads work at once; LAPACK needs none (0.6x for 100000 x 10)
        slender = A.device.type != "cpu" and A.shape[-2] >= 16 * max(_BLOCK_ROWS, 4 * A.shape[-1])
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
    U: Tensor = _Polar.apply(accumulate(A))  # type: ignore[no-untyped-call]
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


def _cholesky(A: Tensor) -> Tensor:
    recorded = torch.is_grad_enabled() and A.requires_grad
    if recorded or A.device.type != "cpu" or A.numel() == 0 or not is_eager():
        return _householder(A)
    once, first = _divide_by_factor(A.double())
    Q64, second = _divide_by_factor(once)
    off = (Q64.mT @ Q64 - torch.eye(A.shape[-1], dtype=torch.float64)).abs().amax((-2, -1))
    allowed = max(torch.finfo(A.dtype).eps / 16, 2e-15 * A.shape[-1] ** 0.5)
    right = (first == 0) & (second == 0) & (off <= allowed)
    Q = Q64.to(A.dtype)
    if not right.all():
        Q[~right] = _householder(A[~right])
    return Q


def _divide_by_factor(A: Tensor) -> tuple[Tensor, Tensor]:
    """A R^-1 with R^T R = A^T A, and the info of the Cholesky factorization."""
    L, info = torch.linalg.cholesky_ex(A.mT @ A)
    return torch.linalg.solve_triangular(L.mT, A, upper=True, left=False), info


class _Polar(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, A: Tensor) -> Tensor:
        U = _polar_factor(A)
        ctx.save_for_backward(A, U)
        return U

    @staticmethod
    def backward(ctx: Any, dU: Tensor) -> Tensor:
        A, U = ctx.saved_tensors
        S, V = torch.linalg.eigh(_symmetric(U.mT @ A))
        inner = U.mT @ dU
        skew = V.mT @ (inner - inner.mT) @ V / (S[..., :, None] + S[..., None, :])
        outside = dU - U @ inner
        dA: Tensor = U @ (V @ skew @ V.mT) + (outside @ V / S[..., None, :]) @ V.mT
        return dA


def _symmetric(A: Tensor) -> Tensor:
    return (A + A.mT) / 2


def _polar_factor(A: Tensor) -> Tensor:
    """Of tall A: the factor of its R, by products alone, and back by Q. SVD where that leaves a
    singular value behind, as for rank-deficient A."""
    if A.numel() == 0:
        return A.clone()
    largest = A.abs().amax((-2, -1), keepdim=True)
    # a zero matrix stays one
    scaled = A / torch.where(largest == 0, 1.0, largest)
    Q, R = qr(scaled)
    X = R / (1.01 * torch.linalg.matrix_norm(R, keepdim=True)).clamp_min(1e-30)
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    allowed = 4 * torch.finfo(A.dtype).eps * A.shape[-1] ** 0.5
    off = torch.full(A.shape[:-2], torch.inf, dtype=A.dtype, device=A.device)
    for step in range(_MOST_STEPS):
        a, b, c = _EXPRESS[step] if step < len(_EXPRESS) else _LAST
        # against singular values that rounding lifts above 1
        damped = 1.01 if step < len(_EXPRESS) else 1.0
        G = X.mT @ X
        off = torch.linalg.matrix_norm(G - eye)
        if step > len(_EXPRESS) and bool((off <= allowed).all()):
            break
        X = X @ (a / damped * eye + b / damped**3 * G + c / damped**5 * (G @ G))
    left = ~(off <= allowed)
    if left.any():
        W, _, Vh = torch.linalg.svd(R[left].nan_to_num(), full_matrices=False)
        X[left] = (W @ Vh).where(R[left].isfinite().all(), torch.nan)
    U: Tensor = Q @ X
    return U


_METHODS: dict[str, Callable[[Tensor], Tensor]] = {
    "householder": _householder,
    "tsqr": _tsqr,
    "cholesky": _cholesky,
    "polar": polar,
}
