# SPDX-License-Identifier: MIT
"""Eigenvalues and eigenvectors of symmetric matrices: A = Q diag(L) Q^T, L ascending."""

from typing import Any

import torch
from torch import Tensor

from metalcore._check import (
    LAPACK_TYPES,
    LinAlgError,
    expect,
    expect_factored,
    expect_float,
    expect_square,
    explain,
)
from metalcore._op import Example, Op, accumulate
from metalcore._policy import policy
from metalcore._trace import left_to_torch

_WAY_OUT = "Look for NaN and inf in A."
_KNOBS = policy("eigh", "cpu")
_LARGEST: int = _KNOBS["interleaved_many_up_to"]
_VALUES_LARGEST: int = _KNOBS["values_interleaved_up_to"]
_VALUES_ALONE: int = _KNOBS["values_alone_from"]
_FEW_ROWS: int = _KNOBS["torch_below_rows"]

_forward = Op("eigh(Tensor A, bool upper) -> (Tensor L, Tensor Q, Tensor info)", batched=True)
_values = Op("eigvalsh(Tensor A, bool upper) -> (Tensor L, Tensor info)", batched=True)


def eigh(
    A: Tensor, UPLO: str = "L", *, check: bool = True
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues and eigenvectors of each symmetric matrix of a batch.

    The signs of eigenvectors are free, and so is the basis of the space of equal eigenvalues:
    gradients are those of losses that do not depend on this choice, and are infinite or NaN for
    equal eigenvalues, as torch's are.

    Args:
        A: symmetric, [..., N, N]. Only one triangle is read.
        UPLO: which triangle: "L" the lower one, "U" the upper one.
        check: raise where A has a NaN or an inf. Without it nothing waits for the result.

    Returns:
        L [..., N] ascending and Q [..., N, N] with A = Q diag(L) Q^T and eigenvectors as columns;
        with `check=False` also info [...] (int32): 0, or not where L and Q are not to be used.

    Example:
        >>> L, Q = metalcore.eigh(A + A.mT)
    """
    if check and _torch_is_ahead(A, UPLO, _LARGEST) and left_to_torch("eigh", A):
        return _call_torch("eigh", A, UPLO)  # type: ignore[no-any-return]
    L, Q, info = _forward(A, _expect_input("eigh", A, UPLO))
    if not check:
        return L, Q, info
    expect_factored("eigh", info, "linalg.eigh", _WAY_OUT)
    return L, Q


def eigvalsh(A: Tensor, UPLO: str = "L", *, check: bool = True) -> Tensor | tuple[Tensor, Tensor]:
    """Eigenvalues of each symmetric matrix of a batch.

    Args:
        A: symmetric, [..., N, N]. Only one triangle is read.
        UPLO: which triangle: "L" the lower one, "U" the upper one.
        check: raise where A has a NaN or an inf. Without it nothing waits for the result.

    Returns:
        L [..., N] ascending; with `check=False` also info [...] (int32): 0, or not where L is not
        to be used.

    Example:
        >>> L = metalcore.eigvalsh(A + A.mT)
    """
    if (
        check
        and _torch_is_ahead(A, UPLO, _VALUES_LARGEST)
        and A.shape[-1] < _VALUES_ALONE
        and left_to_torch("eigvalsh", A)
    ):
        return _call_torch("eigvalsh", A, UPLO)  # type: ignore[no-any-return]
    upper = _expect_input("eigvalsh", A, UPLO)
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
    expect(UPLO in ("L", "U", "l", "u"), op, f'UPLO must be "L" or "U", got {UPLO!r}')
    return UPLO in ("U", "u")


def _torch_is_ahead(A: Tensor, UPLO: str, largest: int) -> bool:
    """For large matrices, and for few: they would leave lanes idle, or do not pay for a call."""
    if A.dtype not in LAPACK_TYPES or UPLO not in ("L", "U"):
        return False
    rank = A.ndim
    if rank <= 2:
        return rank == 2
    n, values = A.shape[-1], A.numel()
    return values <= 2 * n * n or values < n * _FEW_ROWS or n > largest


def _call_torch(op: str, A: Tensor, UPLO: str) -> Any:
    try:
        if op == "eigh":
            result = L, _ = torch.linalg.eigh(A, UPLO)
        else:
            result = L = torch.linalg.eigvalsh(A, UPLO)
    except LinAlgError as error:
        explain(op, error, _WAY_OUT)
    except RuntimeError:
        _expect_input(op, A, UPLO)
        raise
    # LAPACK's method for more than 25 rows may return NaN without a word
    if A.numel() > 25 * 25 and not torch.equal(L, L):
        expect_factored(op, L.isnan().any(-1).int() * A.shape[-1], f"linalg.{op}", _WAY_OUT)
    return result


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
