# SPDX-License-Identifier: MIT
"""QR decomposition by Householder reflectors: A = Q R."""

from typing import Any

import torch
from torch import Tensor

from metalcore._accuracy import set_accuracy
from metalcore._check import expect, expect_float, expect_matrix, expect_one_of, refuse
from metalcore._op import Example, Op, accumulate
from metalcore._route import Matrices
from metalcore.ops.linalg._precision import doubled, is_double

_MODES = ("reduced", "complete", "r")
_route = Matrices("qr")
set_accuracy("qr", 16.0)

_forward = Op(
    "qr(Tensor A, str mode) -> (Tensor Q, Tensor R)", batched=True, sharding="*MN -> *MK, *KN"
)


def qr(A: Tensor, mode: str = "reduced", *, precision: str | None = None) -> tuple[Tensor, Tensor]:
    """QR decomposition of each matrix of a batch: A = Q R, Q orthonormal, R upper triangular.

    Q is orthonormal whatever the rank and the scale of A. The diagonal of R has the signs that
    LAPACK gives it.

    Args:
        A: [..., M, N], of any shape; K = min(M, N).
        mode: "reduced": Q [..., M, K] and R [..., K, N]; "complete": Q [..., M, M] and
            R [..., M, N]; "r": R [..., K, N] alone, with an empty Q.
        precision: `"float64"` computes and returns float64: on a GPU, which has none, a
            `metalcore.precise.DoubleFloat` of 48 bits.

    Returns:
        Q and R. Gradients exist where torch has them: not for "r", and for "complete" only where
        M <= N.

    Example:
        >>> Q, R = metalcore.qr(torch.randn(1000, 16, 16))
    """
    expect_one_of("qr", "mode", mode, _MODES)
    if is_double(precision, A):
        double, A = doubled("qr", precision, A=A)
        if double is not None:
            expect_matrix("qr", "A", A)
            return double.qr(A, mode)  # type: ignore[no-any-return]
    expect_float("qr", A=A)
    expect_matrix("qr", "A", A)
    # what has no gradient is said by our op
    if (mode == "reduced" or not A.requires_grad) and _route.prefers_torch(A):
        Q, R = _route.by_torch(torch.linalg.qr, A, mode)
    else:
        Q, R = _forward(A, mode)
    return (R.new_empty(0) if mode == "r" else Q), R


@_forward.reference
def _(A: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    Q, R = torch.linalg.qr(accumulate(A), mode)
    if mode == "r":
        Q = A[..., :0]
    return Q.to(A.dtype).contiguous(), R.to(A.dtype).contiguous()


def _example(m: int, n: int) -> None:
    @_forward.example
    def _(dtype: torch.dtype) -> Example:
        A = torch.randn(3, m, n) + 3 * torch.eye(m, n)
        return Example((A.to(dtype), "reduced"), reduces_over=max(m, n))


# a matrix in a lane's registers, in threadgroup memory, and by panels
for _shape in ((13, 9), (37, 21), (70, 66)):
    _example(*_shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    A, mode = inputs
    m, n = A.shape[-2:]
    expect(
        mode != "r",
        "qr",
        'the gradient needs Q, which mode="r" does not compute; use mode="reduced"',
    )
    if mode == "complete" and m > n:
        refuse(
            "qr",
            f'mode="complete" has no gradient for more rows than columns, got {[m, n]}; '
            'use mode="reduced"',
        )
    ctx.save_for_backward(A, *output)


@_forward.gradient(save=_save)
def _(ctx: Any, dQ: Tensor, dR: Tensor) -> Any:
    A, Q, R = ctx.saved_tensors
    m, n = A.shape[-2:]
    dtype = A.dtype
    A, Q, R, dQ, dR = (accumulate(x) for x in (A, Q, R, dQ, dR))
    if m >= n:
        dA = square_gradient(Q, R, dQ, dR)
    else:
        # A = [X Y] with X = Q U square, and R = [U Q^T Y]
        dU, dV = dR[..., :m], dR[..., m:]
        dX = square_gradient(Q, R[..., :m], dQ + A[..., m:] @ dV.mT, dU)
        dA = torch.cat([dX, Q @ dV], -1)
    return dA.to(dtype), None


def square_gradient(Q: Tensor, R: Tensor, dQ: Tensor, dR: Tensor) -> Tensor:
    """(dQ + Q sym(M)) R^-T with M = triu(dR R^T - Q^T dQ), sym(M) = M + M^T - diag(M)."""
    M = (dR @ R.mT - Q.mT @ dQ).triu()
    inner = dQ + Q @ (M + M.triu(1).mT)
    dA: Tensor = torch.linalg.solve_triangular(R.mT, inner, upper=False, left=False)
    return dA
