# SPDX-License-Identifier: MIT
"""Moore-Penrose pseudo-inverse: V diag(1 / S) U^T over the singular values that count."""

from typing import Any

import torch
from torch import Tensor

from metalcore._check import LinAlgError, expect_float, expect_matrix, expect_square, explain
from metalcore._op import Composition, Example, accumulate, accumulate_dtype
from metalcore._route import Matrices
from metalcore._sharding import is_dtensor, replicated
from metalcore.ops.linalg._precision import doubled, is_double
from metalcore.ops.linalg.eigh import eigh
from metalcore.ops.linalg.svd import WAY_OUT, inverted, svd

_route = Matrices("pinv")
_pinv = Composition(
    "pinv(Tensor A, Tensor rcond, bool hermitian) -> Tensor",
    batched=True,
    sharding="*MN, *U -> *NM",
)


def pinv(
    A: Tensor,
    *,
    rcond: float | Tensor | None = None,
    hermitian: bool = False,
    precision: str | None = None,
) -> Tensor:
    """Pseudo-inverse of each matrix of a batch.

    Its gradient needs no gaps between singular values, but a rank that does not change nearby.

    Args:
        A: [..., M, N].
        rcond: singular values up to this times the largest count as zero; a number, or [...].
            Default max(M, N) times the machine epsilon, as torch has it.
        hermitian: A is symmetric, which is not checked: its lower triangle is read.
        precision: `"float64"` computes and returns float64: on a GPU, which has none, a
            `metalcore.precise.DoubleFloat` of 48 bits.

    Returns:
        [..., N, M].

    Example:
        >>> X = metalcore.pinv(A) @ B
    """
    if is_double(precision, A):
        double, A = doubled("pinv", precision, A=A)
        if double is not None:
            (expect_square if hermitian else expect_matrix)("pinv", "A", A)
            return double.pinv(A, rcond, hermitian)  # type: ignore[no-any-return]
    expect_float("pinv", A=A)
    (expect_square if hermitian else expect_matrix)("pinv", "A", A)
    if _route.prefers_torch(A):
        return _route.by_torch(_call_torch, A, rcond, hermitian)
    return by_kernels(A, rcond, hermitian)


def by_kernels(A: Tensor, rcond: float | Tensor | None, hermitian: bool) -> Tensor:
    """`pinv` of an A that is as it should be, whatever its size."""
    limit = torch.as_tensor(cutoff(A, rcond), dtype=accumulate_dtype(A), device=A.device)
    limits = limit.expand(*A.shape[:-2], 1)
    limits = limits if is_dtensor(limits) else replicated(limits, A)
    P: Tensor = _pinv(accumulate(A), limits, hermitian)
    return P.to(A.dtype)


def _call_torch(A: Tensor, rcond: float | Tensor | None, hermitian: bool) -> Tensor:
    wide = A.shape[-2] < A.shape[-1]
    try:
        P: Tensor = torch.linalg.pinv(A.mT if wide else A, rtol=rcond, hermitian=hermitian)
    except LinAlgError as error:
        explain("pinv", error, WAY_OUT)
    return P.mT if wide else P


def cutoff(A: Tensor, rcond: float | Tensor | None) -> float | Tensor:
    """rcond, or torch's default for it, to compare with singular values [..., K]."""
    if rcond is None:
        return max(A.shape[-2:]) * float(torch.finfo(accumulate_dtype(A)).eps)
    return rcond[..., None].to(A.device) if isinstance(rcond, Tensor) else rcond


@_pinv.forward
def _(A: Tensor, rcond: Tensor, hermitian: bool) -> Tensor:
    if min(A.shape[-2:]) == 0:
        return A.new_zeros(A.mT.shape)
    if hermitian:
        L, Q = eigh(A)  # type: ignore[misc]
        counts = L.abs() > rcond * L.abs().amax(-1, keepdim=True)
        P: Tensor = (Q * torch.where(counts, 1 / L, torch.zeros_like(L))[..., None, :]) @ Q.mT
    else:
        U, S, V = svd(A)
        P = (V * inverted(S, rcond)[..., None, :]) @ U.mT
    return P


@_pinv.reference
def _(A: Tensor, rcond: Tensor, hermitian: bool) -> Tensor:
    P: Tensor = torch.linalg.pinv(A, rtol=rcond.detach()[..., 0], hermitian=hermitian)
    return P


@_pinv.example
def _(dtype: torch.dtype) -> Example:
    return Example((torch.randn(2, 5, 4).to(dtype), torch.zeros(2, 1).to(dtype), False), 5)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


@_pinv.gradient(save=_save)
def _(ctx: Any, dP: Tensor) -> Any:
    A, P = ctx.saved_tensors
    return gradient(A, P, dP), None, None


def gradient(A: Tensor, P: Tensor, dP: Tensor) -> Tensor:
    """torch's formula (Golub and Pereyra), which is by products alone."""
    G = dP.mT
    if A.shape[-2] <= A.shape[-1]:
        K = G @ P
        KPt = K @ P.mT
        dA = KPt - (P @ K).mT - (A @ P) @ KPt + (P.mT @ P) @ (G - K @ A)
    else:
        K = P @ G
        PtK = P.mT @ K
        dA = PtK - (K @ P).mT - (PtK @ P) @ A + ((G - A @ K) @ P) @ P.mT
    return dA
