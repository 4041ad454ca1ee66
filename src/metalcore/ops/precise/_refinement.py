# SPDX-License-Identifier: MIT
"""Linear algebra of DoubleFloats [batch, M, N]: factors in float32, corrected until they are right
to 48 bits.

What is left of A after a product of factors is computed as sums of three floats (`left`), so that
corrections know where they lead: results are as near as 48 bits allow, also where A is
ill-conditioned. Gradients are in `_double_float_linalg.py`.
"""

import torch
from torch import Tensor

from metalcore._check import is_eager
from metalcore.ops.linalg.cholesky import cholesky as cholesky32
from metalcore.ops.linalg.lu import lu as lu32
from metalcore.ops.linalg.qr import qr as qr32
from metalcore.ops.linalg.trsm import trsm as trsm32
from metalcore.ops.precise import double_float
from metalcore.ops.precise.double_float import DoubleFloat, of_pair, triangular

EPS = 2.0**-47
_EPS32 = 2.0**-23
MOST_STEPS = 30
# Where nothing can be looked at, because a compiler records the steps.
BLIND_STEPS = 8


def left(
    C: DoubleFloat, A: DoubleFloat, B: DoubleFloat, D: DoubleFloat | None = None
) -> DoubleFloat:
    """C - A B, less D."""
    return double_float.left(C, A, B, zeros(C.high) if D is None else D)


def _divided(B: DoubleFloat, R: DoubleFloat) -> DoubleFloat:
    """X with X R = B, for upper triangular R."""
    X: DoubleFloat = triangular(R.mT, B.mT, lower=True).mT  # type: ignore[assignment, arg-type]
    return X


def plain(x: Tensor) -> DoubleFloat:
    return of_pair(x, torch.zeros_like(x))


def zeros(like: Tensor) -> DoubleFloat:
    return plain(torch.zeros_like(like, memory_format=torch.contiguous_format))


def identity(n: int, like: Tensor) -> DoubleFloat:
    eye = torch.eye(n, dtype=torch.float32, device=like.device)
    return plain(eye.expand(*like.shape[:-2], n, n).contiguous())


def scaled(x: DoubleFloat, exponent: Tensor) -> DoubleFloat:
    """x 2^exponent, without error."""
    return of_pair(torch.ldexp(x.high, exponent), torch.ldexp(x.low, exponent))


def exponent_of(x: DoubleFloat, *dims: int) -> Tensor:
    """Of the largest number along `dims`."""
    if 0 in (x.shape[d] for d in dims):
        sizes = [1 if d - x.dim() in dims else n for d, n in enumerate(x.shape)]
        return torch.zeros(sizes, dtype=torch.int32, device=x.device)
    return torch.frexp(x.high.abs().amax(dims, keepdim=True))[1]


def size_of(x: Tensor) -> Tensor:
    if 0 in x.shape[-2:]:
        return x.new_zeros(*x.shape[:-2], 1, 1)
    return x.abs().amax((-2, -1), keepdim=True)


def _is(condition: Tensor) -> bool:
    return bool(condition.all())


def qr(A: DoubleFloat) -> tuple[DoubleFloat, DoubleFloat, Tensor]:
    """Q, R and where Q is orthonormal [batch, 1, 1], for M >= N: Q = A R^-1 for the R that float32
    finds, corrected by the R of Q; at last by the series of a Cholesky factor of Q^T Q."""
    exponent = exponent_of(A, -2, -1)
    n = A.shape[-1]
    eye = identity(n, A.high[..., :n, :])
    Q, R = scaled(A, -exponent), eye
    for _ in range(BLIND_STEPS):
        rest = left(eye, Q.mT, Q)  # type: ignore[arg-type]
        size = size_of(rest.high)
        is_near = size < 0.1
        if is_eager() and _is(size < 4 * EPS):
            break
        # Q^T Q = (I + T)^T (I + T), T = triu(E) - diag(E) / 2, up to E^2
        E = -rest
        near: DoubleFloat = eye + E.triu() - E.tril().triu() / 2  # type: ignore[assignment]
        far = near if is_eager() and _is(is_near) else plain(_solid(qr32(Q.high)[1]))
        step: DoubleFloat = torch.where(is_near, near, far)  # type: ignore[assignment]
        Q, R = _divided(Q, step), (step @ R).triu()  # type: ignore[assignment]
    return Q, scaled(R, exponent), size < _EPS32


def orthonormal(U: DoubleFloat) -> tuple[DoubleFloat, DoubleFloat]:
    """The Q of U whose R has a positive diagonal, and that diagonal."""
    Q, R, _ = qr(U)
    diagonal: DoubleFloat = R.diagonal(dim1=-2, dim2=-1)  # type: ignore[assignment]
    signs = torch.where(diagonal.high < 0, -1.0, 1.0)[..., None, :]
    return of_pair(Q.high * signs, Q.low * signs), diagonal.abs()  # type: ignore[return-value]


def _solid(R: Tensor) -> Tensor:
    """R with a diagonal that can be divided by."""
    diagonal = R.diagonal(dim1=-2, dim2=-1)
    least = (_EPS32 * size_of(R)[..., 0]).clamp(min=torch.finfo(torch.float32).tiny)
    safe = torch.where(diagonal.abs() < least, torch.where(diagonal < 0, -least, least), diagonal)
    return R + torch.diag_embed(safe - diagonal)


def dependent(R: DoubleFloat) -> Tensor:
    """Number of the first column that depends on those before it to 48 bits, or 0: [batch]."""
    diagonal = R.high.diagonal(dim1=-2, dim2=-1).abs()
    least = R.shape[-1] * 8 * EPS * size_of(R.high)[..., 0]
    is_small = ~(diagonal > least)
    first = is_small.int().argmax(-1) + 1 if is_small.shape[-1] else is_small.sum(-1)
    return torch.where(is_small.any(-1), first, 0).int()


def solve(A: DoubleFloat, B: DoubleFloat) -> tuple[DoubleFloat, Tensor]:
    """X with A X = B, and info [batch]: LU in float32 and what it leaves; where that leads nowhere,
    by QR."""
    none = torch.zeros(A.shape[:-2], dtype=torch.int32, device=A.device)
    if B.numel() == 0:
        return zeros(B.high), none
    of_A, of_B = exponent_of(A, -2, -1), exponent_of(B, -2)
    A, B = scaled(A, -of_A), scaled(B, -of_B)
    found = _by_lu(A, B)
    X, info = (found, none) if found is not None else _by_qr(A, B)
    return scaled(X, of_B - of_A), info


def _by_lu(A: DoubleFloat, B: DoubleFloat) -> DoubleFloat | None:
    """X, or None where refinement does not find it."""
    P, L, U = lu32(A.high)
    safe = _solid(U)
    if is_eager() and not torch.equal(safe, U):
        return None
    X, last = zeros(B.high), torch.inf
    steps = MOST_STEPS if is_eager() else BLIND_STEPS
    for _ in range(steps):
        rest = left(B, A, X).high
        step = trsm32(safe, trsm32(L, P.mT @ rest, unit_diagonal=True), lower=False)
        X = X + plain(step)  # type: ignore[assignment]
        if is_eager():
            size = float((step.abs().amax(-2) / _nonzero(X.high.abs().amax(-2))).max())
            if size <= 2 * EPS:
                return X
            if not size < last / 2:
                return None
            last = size
    return X


def _nonzero(x: Tensor) -> Tensor:
    return torch.where(x == 0, 1, x)


def _by_qr(A: DoubleFloat, B: DoubleFloat) -> tuple[DoubleFloat, Tensor]:
    Q, R, _ = qr(A)
    info = dependent(R)
    X = zeros(B.high)
    for _ in range(BLIND_STEPS):
        step = triangular(R, Q.mT @ left(B, A, X), lower=False)  # type: ignore[arg-type]
        X = X + step  # type: ignore[assignment]
    return X, info


def augmented(
    A: DoubleFloat, b: DoubleFloat, c: DoubleFloat
) -> tuple[DoubleFloat, DoubleFloat, Tensor]:
    """r and x with r + A x = b and A^T r = c, for M >= N, and info [batch]: least squares where c
    is zero, the smallest r with A^T r = c where b is."""
    exponent = exponent_of(A, -2, -1)
    A, c = scaled(A, -exponent), scaled(c, -exponent)
    Q, R, _ = qr(A)
    r, x = zeros(b.high), zeros(c.high)
    for _ in range(BLIND_STEPS):
        f, g = left(b, A, x, r), left(c, A.mT, r)  # type: ignore[arg-type]
        h = triangular(R.mT, g, lower=True)  # type: ignore[arg-type]
        d: DoubleFloat = Q.mT @ f - h  # type: ignore[assignment]
        x = x + triangular(R, d, lower=False)  # type: ignore[assignment]
        r = r + left(f, Q, d)  # type: ignore[assignment]
    return r, scaled(x, -exponent), dependent(R)


def cholesky(A: DoubleFloat) -> tuple[DoubleFloat, Tensor]:
    """L of symmetric A, and info [batch]: that of float32, corrected by the factor of
    L^-1 A L^-T, which is nearly the identity."""
    n = A.shape[-1]
    diagonal = A.high.diagonal(dim1=-2, dim2=-1)
    # powers of two that make the diagonal about 1
    half = torch.div(torch.frexp(diagonal)[1], 2, rounding_mode="floor")
    A = scaled(scaled(A, -half[..., None, :]), -half[..., :, None])
    eye = identity(n, A.high)
    L32, info = _factor32(A.high)
    L, last = plain(L32), torch.inf
    for _ in range(MOST_STEPS if is_eager() else BLIND_STEPS):
        rest = left(A, L, L.mT).high  # type: ignore[arg-type]
        E = trsm32(L.high, trsm32(L.high, rest).mT)
        E = (E + E.mT) / 2
        is_near = size_of(E) < 0.3
        G = E.tril() - torch.diag_embed(E.diagonal(dim1=-2, dim2=-1) / 2)
        if not (is_eager() and _is(is_near)):
            far, found = cholesky32(E + eye.high, check=False)
            info = torch.where(is_near[..., 0, 0] | (info != 0), info, found)
            far = torch.where((info != 0)[..., None, None], eye.high, far)
            G = torch.where(is_near, G, far - eye.high)
        L = L + L @ plain(G)  # type: ignore[assignment]
        size = float(size_of(G).max()) if is_eager() and G.numel() else 0.0
        if is_eager() and (size <= 2 * EPS or not size < last):
            break
        last = size
    return scaled(L.tril(), half[..., :, None]), info  # type: ignore[arg-type]


def _factor32(A: Tensor) -> tuple[Tensor, Tensor]:
    """A factor in float32 of A or of a multiple of the identity more, and info where there is none
    even then."""
    L, info = cholesky32(A, check=False)
    for shift in (1.0, 64.0):
        if not is_eager() or _is(info == 0):
            break
        more = 4 * shift * A.shape[-1] * _EPS32 * torch.eye(A.shape[-1], device=A.device)
        again, found = cholesky32(A + more, check=False)
        failed = (info != 0)[..., None, None]
        L, info = torch.where(failed, again, L), torch.where(info != 0, found, info)
    eye = torch.eye(A.shape[-1], device=A.device).expand_as(A)
    return torch.where((info != 0)[..., None, None], eye, L).contiguous(), info
