# SPDX-License-Identifier: MIT
"""Matrix products without error, from products of slices that are exact in float64 or float32.

A row of A is cut into slices of so few bits (Ozaki) that the sums of their products with slices of
a column of B are whole numbers that the hardware holds: any order of addition gives the same. Their
number follows from the exponents in A and B. What needs too many is computed by dot products.
"""

import math
from typing import Any

import torch
from torch import Tensor

from metalcore._check import (
    expect_float,
    expect_rank,
    expect_same_device,
    expect_same_dtype,
    is_eager,
    refuse,
    shape,
)
from metalcore._op import Composition, Example
from metalcore.ops.precise._levels import LEVELS, level_number, widest
from metalcore.ops.precise.dot import dot
from metalcore.ops.precise.sum import sum as exact_sum

_EXACT = LEVELS.index("exact")
_COMPENSATED = LEVELS.index("compensated")
# By the type that slices are multiplied in; eight of float32 stay above its smallest numbers.
_MOST_SLICES = {torch.float64: 12, torch.float32: 8}

_forward = Composition(
    "precise_matmul(Tensor A, Tensor B, int level) -> Tensor",
    batched=True,
    sharding="*mK, *Kn -> *mn",
)


def matmul(A: Tensor, B: Tensor, *, level: str = "compensated") -> Tensor:
    """The product of matrices, with less or no error.

    Args:
        A: [..., M, K].
        B: [..., K, N], of the same dtype; batch dimensions broadcast.
        level: `"exact"` is the nearest number to each true sum of true products, bitwise the same
            for any number of threads, order and device. Else products of float32 and narrower types
            are computed in float64 on a CPU, and exactly on a GPU, which has none; `"compensated"`
            products of float64 are exact.

    Returns:
        [..., M, N] in the dtype of A.

    Example:
        >>> C = metalcore.precise.matmul(torch.randn(64, 300), torch.randn(300, 32), level="exact")
    """
    expect_float("matmul", A=A, B=B)
    expect_same_device("matmul", A=A, B=B)
    expect_same_dtype("matmul", A=A, B=B)
    for x in (A, B):
        expect_rank("matmul", x, 2)
    if A.shape[-1] != B.shape[-2]:
        refuse("matmul", f"A must have as many columns as B rows; got {shape(A)} and {shape(B)}")
    number = level_number("matmul", level, A)
    batch = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
    A, B = A.expand(*batch, *A.shape[-2:]), B.expand(*batch, *B.shape[-2:])
    return _forward(A, B, number)  # type: ignore[no-any-return]


@_forward.reference
def _(A: Tensor, B: Tensor, level: int) -> Tensor:
    return (widest(A) @ widest(B)).to(A.dtype)


@_forward.forward
def _(A: Tensor, B: Tensor, level: int) -> Tensor:
    is_exact = level == _EXACT or A.device.type == "mps"
    if not is_exact and (A.dtype != torch.float64 or level != _COMPENSATED):
        return (A.double() @ B.double()).to(A.dtype)
    # how many slices there are is known from the values alone
    found = _by_slices(A, B) if is_eager() else None
    return _by_dots(A, B) if found is None else found


def _by_dots(A: Tensor, B: Tensor) -> Tensor:
    columns = B.mT[..., None, :, :]
    rows = [dot(row, columns, level="exact") for row in A[..., :, None, :].split(1, -3)]
    return torch.cat(rows, -2) if rows else A.new_zeros(*A.shape[:-1], B.shape[-1])


def _by_slices(A: Tensor, B: Tensor) -> Tensor | None:
    """The product, or None where slices cannot hold it."""
    wide = widest(A).dtype
    digits = 53 if wide == torch.float64 else 24
    bits = (digits - math.ceil(math.log2(max(1, A.shape[-1])))) // 2
    if A.numel() == 0 or B.numel() == 0 or bits < 1:
        return None
    of_A, of_B = _cut(A.to(wide), bits, -1), _cut(B.to(wide), bits, -2)
    if of_A is None or of_B is None:
        return None
    (slices_A, exponent_A), (slices_B, exponent_B) = of_A, of_B
    exponent = exponent_A + exponent_B
    # the last bit of all, and the first one, are within the type
    info = torch.finfo(wide)
    least = round(math.log2(info.smallest_normal)) - digits + 1
    lowest = bits * (len(slices_A) + len(slices_B))
    if int(exponent.min()) - lowest < least or int(exponent.max()) + digits > -least // 2:
        return None
    terms = [
        torch.ldexp(a @ b, torch.tensor(-bits * (i + j + 2)))
        for i, a in enumerate(slices_A)
        for j, b in enumerate(slices_B)
    ]
    return _rounded(torch.stack(terms, -1), exponent, A.dtype)


def _cut(x: Tensor, bits: int, dim: int) -> tuple[list[Tensor], Tensor] | None:
    """Whole numbers s_1, s_2, ... of so many bits and an exponent e along `dim`, with
    x = 2^e (s_1 2^-bits + s_2 2^(-2 bits) + ...); None where they would be too many."""
    if not bool(x.isfinite().all()):
        return None
    exponent = torch.frexp(x.abs().amax(dim, keepdim=True))[1]
    rest = torch.ldexp(x, -exponent)
    if bool(((rest == 0) != (x == 0)).any()):
        return None
    slices: list[Tensor] = []
    while not slices or bool(rest.any()):
        if len(slices) == _MOST_SLICES[x.dtype]:
            return None
        rest = rest * 2.0**bits
        slices.append(rest.round())
        rest = rest - slices[-1]
    return slices, exponent


def _rounded(terms: Tensor, exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """The exact sums of terms [..., n] times 2^exponent, in `dtype`."""
    # a sum of zero is not -0, as of dot products
    total = exact_sum(terms, -1, level="exact") + 0.0
    if terms.dtype != dtype:
        # rounded once: what is left over decides where a narrower type sees a tie
        left = exact_sum(torch.cat((terms, -total[..., None]), -1), -1, level="exact")
        total = _to_odd(total, left)
    total = torch.ldexp(total, exponent)
    if terms.dtype == torch.float64 and dtype in (torch.float16, torch.bfloat16):
        narrow = total.float()
        total = _to_odd(narrow, (total - narrow.double()).float())
    return total.to(dtype)


def _to_odd(x: Tensor, left: Tensor) -> Tensor:
    """x + left, where it is no number of the type, as the neighbour with an odd last bit."""
    integers = torch.int64 if x.dtype == torch.float64 else torch.int32
    is_even = (x.view(integers) & 1) == 0
    toward = torch.where(left > 0, torch.inf, -torch.inf).to(x.dtype)
    return torch.where((left != 0) & is_even, torch.nextafter(x, toward), x)


@_forward.example
def _(dtype: torch.dtype) -> Example:
    A, B = torch.randn(2, 5, 9).to(dtype), torch.randn(2, 9, 4).to(dtype)
    return Example((A, B, _EXACT), reduces_over=9)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    A, B, ctx.level = inputs
    ctx.save_for_backward(A, B)


@_forward.gradient(save=_save)
def _(ctx: Any, dC: Tensor) -> Any:
    A, B = ctx.saved_tensors
    return _forward(dC, B.mT, ctx.level), _forward(A.mT, dC, ctx.level), None
