# SPDX-License-Identifier: MIT
"""Eigenvalues and singular values of DoubleFloats [batch, M, N]: vectors that float32 finds,
corrected until they are right to 48 bits.

A correction is that of Ogita and Aishima: what couples vectors i and j, over the gap between their
values. Vectors whose coupling is not small beside the gap are a cluster: float32 finds them again
in the small matrix that the cluster makes, less its first value, so that it sees the gaps.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from metalcore._check import is_eager
from metalcore.ops.linalg.eigh import eigh as eigh32
from metalcore.ops.linalg.qr import qr as qr32
from metalcore.ops.linalg.svd import svd as svd32
from metalcore.ops.precise._refinement import (
    BLIND_STEPS,
    EPS,
    MOST_STEPS,
    exponent_of,
    identity,
    left,
    orthonormal,
    plain,
    scaled,
    size_of,
    zeros,
)
from metalcore.ops.precise.double_float import DoubleFloat

Couplings = Callable[[DoubleFloat, DoubleFloat], tuple[DoubleFloat, DoubleFloat]]

# Singular values below this part of the largest are what 48 bits of V leave of zero.
_NOTHING = 16 * EPS


def eigh(A: DoubleFloat) -> tuple[DoubleFloat, DoubleFloat, Tensor]:
    """L ascending, Q and info [batch], for symmetric A."""
    exponent = exponent_of(A, -2, -1)
    A = scaled(A, -exponent)
    _, Q, info = eigh32(A.high, check=False)  # type: ignore[misc]

    def couplings(X: DoubleFloat, R: DoubleFloat) -> tuple[DoubleFloat, DoubleFloat]:
        # X^T (A X - X L), of what is left where all of it cancels: one product, to 48 bits
        L = (X * (A @ X)).sum(-2) / (1 - _diagonal(R))
        both = torch.cat([A, X], -1), torch.cat([X, -torch.diag_embed(L)], -2)
        N: Any = -(X.mT @ left(zeros(A.high), *both))  # type: ignore[arg-type]
        return L + _diagonal(N), N  # type: ignore[return-value]

    L, X = _corrected(plain(Q), couplings, A.shape[-1] * 2.0**-50)
    order = _ascending(L)
    return scaled(_taken(L, order), exponent[..., 0]), _taken(X, order[..., None, :]), info


def svd(A: DoubleFloat) -> tuple[DoubleFloat, DoubleFloat, DoubleFloat, Tensor]:
    """U, S descending, V and info [batch], for M >= N. V makes the columns of A V orthogonal, as
    eigenvectors of A^T A do; that is never computed, so small values keep their digits."""
    exponent = exponent_of(A, -2, -1)
    A = scaled(A, -exponent)
    _, _, V32, info = svd32(A.high, check=False)

    def couplings(X: DoubleFloat, R: DoubleFloat) -> tuple[DoubleFloat, DoubleFloat]:
        # of -A^T A, whose eigenvalues ascend
        W = left(zeros(A.high), A, X)
        G: Any = -(W.mT @ W)
        L: Any = _diagonal(G) / (1 - _diagonal(R))
        return L, G + R * L[..., None, :]

    L, V = _corrected(plain(V32), couplings, _NOTHING**2)
    V = _taken(V, _ascending(L)[..., None, :])
    W = -left(zeros(A.high), A, V)
    S: Any = (W * W).sum(-2).sqrt()
    # a column of nothing is any that is orthogonal to the others: Q of zeros is
    counts = (S.high > _NOTHING * size_of(S.high[..., None])[..., 0])[..., None, :]
    U: DoubleFloat = W / torch.where(counts, S[..., None, :], 1.0)  # type: ignore[assignment]
    if not is_eager() or not bool(counts.all()):
        rest = plain(qr32(torch.where(counts, U.high, 0))[0])
        U = torch.where(counts, U, rest)  # type: ignore[assignment]
    # a column's error, which V has, is that of larger ones: these come first
    U, scale = orthonormal(U)
    S = S * scale
    order = _ascending(-S)
    U, V = (_taken(x, order[..., None, :]) for x in (U, V))
    return U, scaled(_taken(S, order), exponent[..., 0]), V, info


def completion(U: DoubleFloat) -> DoubleFloat:
    """The M - K columns [batch, M, M - K] that make K orthonormal ones a basis."""
    rest = plain(qr32(U.high, "complete")[0][..., U.shape[-1] :].contiguous())
    for _ in range(3):
        rest = rest - U @ (U.mT @ rest)  # type: ignore[assignment]
        eye = identity(rest.shape[-1], rest.high)
        rest = rest + rest @ left(eye, rest.mT, rest) / 2  # type: ignore[assignment, arg-type]
    return rest


def _corrected(
    X: DoubleFloat, couplings: Couplings, nothing: float
) -> tuple[DoubleFloat, DoubleFloat]:
    """Values and vectors, from vectors that are nearly right. What is less than `nothing` times the
    largest value is an error of the couplings."""
    last = torch.inf
    eye = identity(X.shape[-1], X.high)
    for _ in range(MOST_STEPS if is_eager() else BLIND_STEPS):
        R = left(eye, X.mT, X)  # type: ignore[arg-type]
        L, N = couplings(X, R)
        E, group, is_clear = _correction(L, N.high, R.high, nothing)
        X = X + X @ plain(E)  # type: ignore[assignment]
        is_clear = is_eager() and is_clear
        if not is_clear:
            X = X @ plain(_turn(L, N.high, group))  # type: ignore[assignment]
        size = float(size_of(E).max()) if is_eager() and E.numel() else 0.0
        if is_clear and (not size > 2 * EPS or last / 2 <= size < 2.0**-8):
            break
        last = size
    for _ in range(2):
        X = X + X @ left(eye, X.mT, X) / 2  # type: ignore[arg-type, assignment]
    return L, X


def _correction(
    L: DoubleFloat, N: Tensor, R: Tensor, nothing: float
) -> tuple[Tensor, Tensor, bool]:
    """What X is to be multiplied with, less I; the number of each vector's cluster [batch, N]; and
    whether each is one vector."""
    n = L.shape[-1]
    gaps = (L[..., None, :] - L[..., :, None]).high  # type: ignore[attr-defined]
    sizes = L.high.abs()
    larger = torch.maximum(sizes[..., None, :], sizes[..., :, None])
    least = 4 * EPS * larger + nothing * size_of(sizes[..., None])
    coupling = torch.maximum(N.abs(), N.mT.abs())
    is_wide = gaps.abs() >= 8 * coupling
    is_near = (~is_wide & (coupling > least)).triu(1)
    # a cluster ends where no vector before is near one behind
    across = is_near.int().cumsum(-2).flip(-1).cumsum(-1).flip(-1)
    ends = across.diagonal(1, -2, -1) == 0
    group = torch.nn.functional.pad(ends.int().cumsum(-1), (1, 0))[..., :n]
    is_far = is_wide & (gaps.abs() > least) & (group[..., None, :] != group[..., :, None])
    E = torch.where(is_far, N / torch.where(is_far, gaps, 1), 0)
    # its symmetric part makes X orthonormal
    return (E - E.mT + R) / 2, group, is_eager() and not bool(is_near.any())


def _turn(L: DoubleFloat, N: Tensor, group: Tensor) -> Tensor:
    """The eigenvectors of every cluster in the basis of its vectors."""
    is_same = group[..., None, :] == group[..., :, None]
    first = torch.arange(L.shape[-1], device=L.device) - is_same.tril(-1).sum(-1)
    shifted = (L - _taken(L, first)).high  # type: ignore[attr-defined]
    T = torch.where(is_same, (N + N.mT) / 2, 0)
    T = T.tril(-1) + T.triu(1) + torch.diag_embed(shifted)
    # values of each are in [-1, 1], and far from those of others
    size = torch.where(is_same, T.abs().sum(-1)[..., None, :], 0).amax(-1)
    T = T / torch.where(size == 0, 1, size)[..., None] + torch.diag_embed(3.0 * group)
    Q: Tensor = eigh32(T, check=False)[1]
    return torch.where(is_same, Q, 0)


def _diagonal(x: DoubleFloat) -> DoubleFloat:
    return x.diagonal(dim1=-2, dim2=-1)  # type: ignore[return-value]


def _ascending(L: DoubleFloat) -> Tensor:
    order = L.low.argsort(dim=-1, stable=True)
    return order.gather(-1, L.high.gather(-1, order).argsort(dim=-1, stable=True))


def _taken(x: DoubleFloat, at: Tensor) -> DoubleFloat:
    """Values or columns by their numbers."""
    return x.gather(-1, at.expand(*x.shape[: at.dim() - 1], at.shape[-1]))  # type: ignore[return-value]
