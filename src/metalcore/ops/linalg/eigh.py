# SPDX-License-Identifier: MIT
"""Eigenvalues and eigenvectors of symmetric matrices: A = Q diag(L) Q^T, L ascending."""

from typing import Any

import torch
from torch import Tensor

from metalcore._accuracy import set_accuracy
from metalcore._check import (
    LinAlgError,
    expect_factored,
    expect_float,
    expect_square,
    explain,
    refuse,
)
from metalcore._op import Example, Op, accumulate
from metalcore._route import Matrices
from metalcore.ops.linalg._precision import doubled, is_double

_WAY_OUT = "Look for NaN and inf in A."

_route = Matrices("eigh", lambda A: (A + A.mT,), square=True)
_values_route = Matrices("eigvalsh", lambda A: (A + A.mT,), square=True)
set_accuracy("eigh", 8.0)
set_accuracy("eigvalsh", 8.0)

_forward = Op(
    "eigh(Tensor A, bool upper) -> (Tensor L, Tensor Q, Tensor info)",
    batched=True,
    sharding="*NN -> *N, *NN, *",
)
_values = Op(
    "eigvalsh(Tensor A, bool upper) -> (Tensor L, Tensor info)",
    batched=True,
    sharding="*NN -> *N, *",
)


def eigh(
    A: Tensor, UPLO: str = "L", *, check: bool = True, precision: str | None = None
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues and eigenvectors of each symmetric matrix of a batch.

    The signs of eigenvectors are free, and so is the basis of the space of equal eigenvalues:
    gradients are those of losses that do not depend on this choice, and are infinite or NaN for
    equal eigenvalues, as torch's are.

    Args:
        A: symmetric, [..., N, N]. Only one triangle is read.
        UPLO: which triangle: "L" the lower one, "U" the upper one.
        check: raise where A has a NaN or an inf. Without it nothing waits for the result.
        precision: `"float64"` computes and returns float64: on a GPU, which has none, a
            `metalcore.precise.DoubleFloat` of 48 bits.

    Returns:
        L [..., N] ascending and Q [..., N, N] with A = Q diag(L) Q^T and eigenvectors as columns;
        with `check=False` also info [...] (int32): 0, or not where L and Q are not to be used.

    Example:
        >>> L, Q = metalcore.eigh(A + A.mT)
    """
    if is_double(precision, A):
        double, A = doubled("eigh", precision, A=A)
        if double is not None:
            return double.eigh(A, _expect_input("eigh", A, UPLO), check)  # type: ignore[no-any-return]
    upper = _expect_input("eigh", A, UPLO)
    if check and _route.prefers_torch(A):
        L, Q = _route.by_torch(_call_torch, A, "eigh", UPLO.upper())
        return L, Q
    L, Q, info = _forward(A, upper)
    if not check:
        return L, Q, info
    expect_factored("eigh", info, "linalg.eigh", _WAY_OUT)
    return L, Q


def eigvalsh(
    A: Tensor, UPLO: str = "L", *, check: bool = True, precision: str | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Eigenvalues of each symmetric matrix of a batch.

    Args:
        A: symmetric, [..., N, N]. Only one triangle is read.
        UPLO: which triangle: "L" the lower one, "U" the upper one.
        check: raise where A has a NaN or an inf. Without it nothing waits for the result.
        precision: `"float64"` computes and returns float64: on a GPU, which has none, a
            `metalcore.precise.DoubleFloat` of 48 bits.

    Returns:
        L [..., N] ascending; with `check=False` also info [...] (int32): 0, or not where L is not
        to be used.

    Example:
        >>> L = metalcore.eigvalsh(A + A.mT)
    """
    if is_double(precision, A):
        double, A = doubled("eigvalsh", precision, A=A)
        if double is not None:
            found = double.eigh(A, _expect_input("eigvalsh", A, UPLO), check)
            return found[0] if check else (found[0], found[2])
    upper = _expect_input("eigvalsh", A, UPLO)
    if check and _values_route.prefers_torch(A):
        return _values_route.by_torch(_call_torch, A, "eigvalsh", UPLO.upper())[0]
    if A.requires_grad and torch.is_grad_enabled():
        # the gradient needs the eigenvectors
        L, _, info = _forward(A, upper)
    else:
        L, info = _values(A, upper)
    if not check:
        return L, info
    expect_factored("eigvalsh", info, "linalg.eigvalsh", _WAY_OUT)
    return L  # type: ignore[no-any-return]


def _expect_input(op: str, A: Tensor, UPLO: str) -> bool:
    """Whether the upper triangle is to be read."""
    expect_float(op, A=A)
    expect_square(op, "A", A)
    if UPLO not in ("L", "U", "l", "u"):
        refuse(op, f'UPLO must be "L" or "U", got {UPLO!r}')
    return UPLO in ("U", "u")


def _call_torch(A: Tensor, op: str, UPLO: str) -> tuple[Tensor, ...]:
    """Eigenvalues, and for `eigh` eigenvectors, by torch."""
    try:
        results = torch.linalg.eigh(A, UPLO) if op == "eigh" else [torch.linalg.eigvalsh(A, UPLO)]
    except LinAlgError as error:
        explain(op, error, _WAY_OUT)
    # one of LAPACK's methods returns NaN without a word
    if not torch.equal(results[0], results[0]):
        info = results[0].isnan().any(-1).int() * A.shape[-1]
        expect_factored(op, info, f"linalg.{op}", _WAY_OUT)
    return tuple(results)


@_forward.reference
def _(A: Tensor, upper: bool) -> tuple[Tensor, Tensor, Tensor]:
    x = accumulate(A)
    finite = (x.triu() if upper else x.tril()).isfinite().flatten(-2).all(-1)
    safe = torch.where(finite[..., None, None], x, torch.zeros_like(x))
    L, Q = torch.linalg.eigh(safe, "U" if upper else "L")
    L = torch.where(finite[..., None], L, torch.full_like(L, torch.nan))
    Q = torch.where(finite[..., None, None], Q, torch.full_like(Q, torch.nan))
    info = torch.where(finite, 0, A.shape[-1]).int()
    return L.to(A.dtype), Q.to(A.dtype).contiguous(), info


@_values.reference
def _(A: Tensor, upper: bool) -> tuple[Tensor, Tensor]:
    outputs: tuple[Tensor, Tensor, Tensor] = _forward.meaning(A, upper)
    return outputs[0], outputs[2]


def _separate(dtype: torch.dtype, batch: int, n: int) -> Tensor:
    """Symmetric matrices with eigenvalues around 1, 2, ..., n."""
    Q = torch.linalg.qr(torch.randn(batch, n, n))[0]
    A: Tensor = Q * (torch.arange(n) + 1 + torch.rand(batch, 1, n) / 4) @ Q.mT
    half: Tensor = (A + A.mT) / 2
    return half.to(dtype)


@_forward.example
def _(dtype: torch.dtype) -> Example:
    return Example((_separate(dtype, 5, 9), False), reduces_over=9)


@_forward.example
def _(dtype: torch.dtype) -> Example:
    return Example((_separate(dtype, 1, 33), True), reduces_over=33)


@_forward.example
def _(dtype: torch.dtype) -> Example:
    # nearly diagonal: few rotations of pairs of blocks
    A = torch.diag(torch.arange(70.0) + 1) + torch.randn(1, 70, 70) / 500
    return Example(((A + A.mT).to(dtype) / 2, False), reduces_over=70)


@_values.example
def _(dtype: torch.dtype) -> Example:
    return Example((_separate(dtype, 5, 9), False), reduces_over=9)


@_forward.determines
def _(L: Tensor, Q: Tensor, info: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return L, Q * L[..., None, :] @ Q.mT, Q @ Q.mT, info


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    L, Q, _ = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(L, Q)


@_forward.gradient(save=_save)
def _(ctx: Any, dL: Tensor | None, dQ: Tensor | None, _info: Any) -> Any:
    L, Q = ctx.saved_tensors
    L_, Q_ = accumulate(L), accumulate(Q)
    # dA = Q (diag(dL) + (Q^T dQ) / E) Q^T with E_ij = L_j - L_i off the diagonal
    inner = torch.zeros_like(Q_) if dL is None else torch.diag_embed(accumulate(dL))
    if dQ is not None:
        turn = Q_.mT @ accumulate(dQ)
        gaps = L_[..., None, :] - L_[..., :, None]
        gaps = gaps + torch.eye(gaps.shape[-1], dtype=gaps.dtype, device=gaps.device)
        inner = inner + (turn - turn.mT) / (2 * gaps)
    return (Q_ @ inner @ Q_.mT).to(Q.dtype), None


def _save_input(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    A, ctx.upper = inputs
    ctx.save_for_backward(A)


@_values.gradient(save=_save_input)
def _(ctx: Any, dL: Tensor, _info: Any) -> Any:
    (A,) = ctx.saved_tensors
    _, Q, _ = _forward(A, ctx.upper)
    Q_ = accumulate(Q)
    return (Q_ * accumulate(dL)[..., None, :] @ Q_.mT).to(A.dtype), None
