# SPDX-License-Identifier: MIT
"""Householder reflectors H = I - tau v v^T with v_0 = 1: finding one, and applying it."""

import torch
from torch import Tensor

from metalcore._check import (
    expect_float,
    expect_matrix,
    expect_one_of,
    expect_rank,
    expect_same_device,
    expect_same_dtype,
    refuse,
    shape,
)
from metalcore._op import Example, Op, accumulate

_vector = Op(
    "householder_vector(Tensor x) -> (Tensor v, Tensor tau)", batched=True, sharding="*N -> *N, *"
)
_apply = Op(
    "apply_householder(Tensor A, Tensor v, Tensor tau, bool left) -> Tensor",
    batched=True,
    sharding="*MN, *K, * -> *MN",
)


def householder_vector(x: Tensor) -> tuple[Tensor, Tensor]:
    """The reflector that maps x to a multiple of its first axis: H x = beta e_0.

    beta is -sign(x_0) |x|, as LAPACK has it. Vectors of any scale are right, because squares are
    taken of x divided by a power of two. Where only x_0 is not zero, H is the identity: tau = 0.

    Args:
        x: vectors, [..., N], N >= 1.

    Returns:
        v [..., N] with v_0 = 1, and tau [...].

    Example:
        >>> v, tau = metalcore.householder_vector(A[:, 0])
    """
    expect_float("householder_vector", x=x)
    expect_rank("householder_vector", x, 1)
    if x.shape[-1] == 0:
        refuse("householder_vector", f"x must not be empty, got {shape(x)}")
    v, tau = _vector(x)
    return v, tau


def apply_householder(A: Tensor, v: Tensor, tau: Tensor, side: str = "left") -> Tensor:
    """H A or A H for the reflector H = I - tau v v^T.

    Args:
        A: [..., M, N].
        v: [..., M] for the left side, [..., N] for the right one.
        tau: [...]. Batch dimensions broadcast.
        side: "left" for H A, "right" for A H.

    Returns:
        [..., M, N].

    Example:
        >>> R = metalcore.apply_householder(A, *metalcore.householder_vector(A[:, 0]))
    """
    op = "apply_householder"
    expect_one_of(op, "side", side, ("left", "right"))
    expect_float(op, A=A, v=v, tau=tau)
    expect_same_dtype(op, A=A, v=v, tau=tau)
    expect_same_device(op, A=A, v=v, tau=tau)
    expect_matrix(op, "A", A)
    left = side == "left"
    length = A.shape[-2 if left else -1]
    if not (v.dim() > 0 and v.shape[-1] == length):
        refuse(
            op,
            f"v must have {length} elements for the {side} side of A {shape(A)}, got {shape(v)}",
        )
    if not A.shape[:-2] == v.shape[:-1] == tau.shape:
        batch = torch.broadcast_shapes(A.shape[:-2], v.shape[:-1], tau.shape)
        A, v = A.expand(*batch, *A.shape[-2:]), v.expand(*batch, length)
        tau = tau.expand(batch)
    y: Tensor = _apply(A, v, tau, left)
    return y


@_vector.reference
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    a = accumulate(x)
    # brought to about 1 by a power of two, which rounds nothing
    exponent = torch.frexp(a.detach().abs().amax(-1, keepdim=True))[1].clamp(-100, 100)
    a = a * torch.ldexp(torch.ones_like(a[..., :1]), -exponent)
    alpha, tail = a[..., :1], a[..., 1:]
    is_multiple = (tail == 0).all(-1, keepdim=True)
    squares = (a * a).sum(-1, keepdim=True)
    norm = torch.where(is_multiple, 1.0, squares).sqrt()
    beta = -torch.copysign(norm, alpha.detach())
    tau = torch.where(is_multiple, 0.0, (beta - alpha) / beta)
    below = torch.where(is_multiple, 0.0, tail / torch.where(is_multiple, 1.0, alpha - beta))
    v = torch.cat([torch.ones_like(alpha), below], -1)
    return v.to(x.dtype), tau.squeeze(-1).to(x.dtype)


@_apply.reference
def _(A: Tensor, v: Tensor, tau: Tensor, left: bool) -> Tensor:
    a, u, t = accumulate(A), accumulate(v), accumulate(tau)[..., None, None]
    if left:
        y = a - t * u[..., :, None] * (u[..., None, :] @ a)
    else:
        y = a - t * (a @ u[..., :, None]) * u[..., None, :]
    return y.to(A.dtype).contiguous()


_vector.differentiate_reference()
_apply.differentiate_reference()


@_vector.example
def _(dtype: torch.dtype) -> Example:
    return Example((torch.randn(3, 40).to(dtype),), reduces_over=40)


for _left in (True, False):

    @_apply.example
    def _(dtype: torch.dtype, left: bool = _left) -> Example:
        A, v, tau = torch.randn(3, 9, 35), torch.randn(3, 9 if left else 35), torch.rand(3)
        return Example((A.to(dtype), v.to(dtype), tau.to(dtype), left), reduces_over=35)
