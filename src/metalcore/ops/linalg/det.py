# SPDX-License-Identifier: MIT
"""Determinants, and their signs and logarithms, from LU factors with partial pivoting."""

from typing import Any

import torch
from torch import Tensor

from metalcore._accuracy import set_accuracy
from metalcore._check import expect_float, expect_square, is_eager
from metalcore._op import Example, Op, accumulate
from metalcore._route import Matrices
from metalcore.ops.linalg.solve import forward as solve

_det_route = Matrices("det", square=True)
_slogdet_route = Matrices("slogdet", square=True)
set_accuracy("det", 8.0)

_forward = Op(
    "det(Tensor A) -> (Tensor det, Tensor sign, Tensor logabsdet)",
    batched=True,
    sharding="*NN -> *, *, *",
)


def det(A: Tensor) -> Tensor:
    """Determinant of each matrix of a batch; 0 where it is singular.

    Args:
        A: square matrices, [..., N, N].

    Returns:
        [...]. The gradient of a singular matrix is that of its determinant too (by its singular
        values), where torch gives zeros unless a second derivative is asked for.

    Example:
        >>> d = metalcore.det(torch.randn(200, 32, 32))
    """
    expect_float("det", A=A)
    expect_square("det", "A", A)
    if _det_route.prefers_torch(A):
        return _det_route.by_torch(torch.linalg.det, A)  # type: ignore[no-any-return]
    return _forward(A)[0]  # type: ignore[no-any-return]


def slogdet(A: Tensor) -> tuple[Tensor, Tensor]:
    """Sign and logarithm of the absolute value of the determinant of each matrix of a batch; 0 and
    -inf where it is singular.

    Args:
        A: square matrices, [..., N, N].

    Returns:
        sign and logabsdet, both [...]. Only logabsdet has a gradient.

    Example:
        >>> sign, logabsdet = metalcore.slogdet(torch.randn(200, 32, 32))
    """
    expect_float("slogdet", A=A)
    expect_square("slogdet", "A", A)
    if _slogdet_route.prefers_torch(A):
        sign, logabsdet = _slogdet_route.by_torch(torch.linalg.slogdet, A)
        return sign.detach(), logabsdet
    _, sign, logabsdet = _forward(A)
    return sign, logabsdet


@_forward.reference
def _(A: Tensor) -> tuple[Tensor, ...]:
    sign, logabsdet = torch.linalg.slogdet(accumulate(A))
    det = torch.linalg.det(accumulate(A))
    return det.to(A.dtype), sign.detach().to(A.dtype), logabsdet.to(A.dtype)


@_forward.determines
def _(det: Tensor, sign: Tensor, logabsdet: Tensor) -> tuple[Tensor, ...]:
    # the sign has no gradient
    return det, logabsdet, sign.nan_to_num(nan=2.0).long()


def _example(batch: int, n: int) -> None:
    @_forward.example
    def _(dtype: torch.dtype) -> Example:
        A = (torch.randn(batch, n, n) / (4 * n**0.5) + torch.eye(n)).roll(4, -2)
        return Example((A.to(dtype),), reduces_over=n)


# rows in the lanes of a simdgroup, in threadgroup memory, and by panels
for _size in ((5, 9), (1, 34), (1, 65)):
    _example(*_size)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(inputs[0], output[0])


@_forward.gradient(save=_save)
def _(ctx: Any, ddet: Tensor | None, _sign: Any, dlogabsdet: Tensor | None) -> Any:
    A, det = ctx.saved_tensors
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    dA = torch.zeros_like(A)
    if dlogabsdet is not None:
        dA = dA + solve(A.mT, eye * dlogabsdet[..., None, None], False)[0]
    if ddet is not None:
        singular = (det == 0)[..., None, None]
        dA = (
            dA
            + solve(torch.where(singular, eye, A).mT, eye * (ddet * det)[..., None, None], False)[0]
        )
        # compilers and function transforms cannot ask; there such a gradient is zero, as torch's
        plain = type(det) is Tensor and is_eager()
        if plain and bool(singular.any()):
            where = (det == 0).nonzero(as_tuple=True)
            dA = dA.index_put(where, _gradient_of_singular(A[where]) * ddet[where][:, None, None])
    return dA


def _gradient_of_singular(A: Tensor) -> Tensor:
    """The cofactors of singular matrices [batch, N, N]: by the products of all but one singular
    value."""
    U, S, Vh = torch.linalg.svd(accumulate(A))
    n = S.shape[-1]
    others = (
        S[:, None, :]
        .expand(-1, n, n)
        .masked_fill(torch.eye(n, dtype=torch.bool, device=S.device), 1.0)
    )
    sign = torch.linalg.det(U) * torch.linalg.det(Vh)
    cofactors: Tensor = (U * others.prod(-1)[:, None, :]) @ Vh * sign[:, None, None]
    return cofactors.to(A.dtype)
