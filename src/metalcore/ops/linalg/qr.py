# SPDX-License-Identifier: MIT
"""QR decomposition by Householder reflectors: A = Q R."""

from typing import Any

import torch
from torch import Tensor

from metalcore._check import LAPACK_TYPES, expect, expect_float, expect_matrix, expect_one_of
from metalcore._op import Example, Op, accumulate
from metalcore._policy import policy
from metalcore._trace import left_to_torch

_MODES = ("reduced", "complete", "r")
_KNOBS = policy("qr", "cpu")
_FEW: int = _KNOBS["torch_below"]

_forward = Op("qr(Tensor A, str mode) -> (Tensor Q, Tensor R)", batched=True)


def qr(A: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    """QR decomposition of each matrix of a batch: A = Q R, Q orthonormal, R upper triangular.

    Q is orthonormal whatever the rank and the scale of A. The diagonal of R has the signs that
    LAPACK gives it.

    Args:
        A: [..., M, N], of any shape; K = min(M, N).
        mode: "reduced": Q [..., M, K] and R [..., K, N]; "complete": Q [..., M, M] and
            R [..., M, N]; "r": R [..., K, N] alone, with an empty Q.

    Returns:
        Q and R. Gradients exist where torch has them: not for "r", and for "complete" only where
        M <= N.

    Example:
        >>> Q, R = metalcore.qr(torch.randn(1000, 16, 16))
    """
    if (
        (mode == "reduced" or (mode in _MODES and not A.requires_grad))
        and torch_is_ahead(A, mode)
        and left_to_torch("qr", A)
    ):
        return torch.linalg.qr(A, mode)  # type: ignore[no-any-return]
    expect_one_of("qr", "mode", mode, _MODES)
    expect_float("qr", A=A)
    expect_matrix("qr", "A", A)
    Q, R = _forward(A, mode)
    return (R.new_empty(0) if mode == "r" else Q), R


def torch_is_ahead(A: Tensor, mode: str) -> bool:
    """For one matrix or a few, which would leave lanes idle, and for large ones. The CPU kernel
    decides the same by its own lanes."""
    rank = A.ndim
    if A.dtype not in LAPACK_TYPES or rank < 2:
        return False
    if rank == 2 or A.numel() < _FEW:
        return True
    *_, m, n = A.shape
    batch, lanes = A.shape[:-2].numel(), 32 // A.itemsize
    # compilers know the power, but no isqrt
    size = int((m * max(m, n) if mode == "complete" else m * n) ** 0.5)
    few = batch < lanes and batch * _KNOBS["lapack_speed"] < lanes * (size + 16)
    return size > _KNOBS["interleaved_up_to"] or (few and size > _KNOBS["interleaved_alone_up_to"])


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
    expect(
        mode == "reduced" or m <= n,
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
