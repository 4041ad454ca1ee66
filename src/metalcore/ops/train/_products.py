# SPDX-License-Identifier: MIT
"""Sums of matrix products, and half precision ones on CPUs that have no instructions for them.

There torch takes 9 (x W^T) to 100 (dy W) times as long as for float32 (256 x 512 x 1376, AVX2). So
blocks of the matrices are multiplied in float32, and their sum is rounded once.
"""

from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from metalcore import _torch
from metalcore._check import is_eager
from metalcore._op import accumulate_dtype

Term = tuple[Tensor, Tensor, float]
"""a [M, K], b [K, N] and a factor."""

# How many values of a and of b are held in float32 at a time, and the least rows and columns of a
# product, below which it is slow.
_HELD = (1 << 22, 1 << 20)
_LEAST = (512, 256)


def sum_of_products(terms: Sequence[Term], dtype: torch.dtype, add: Tensor | None = None) -> Tensor:
    """add + the sum of factor * a @ b, [M, N], in `dtype`; `add` broadcasts, and stays as it is."""
    a, b, _ = terms[0]
    if not _takes_blocks(a, b):
        return _by_torch(terms, dtype, add)
    out = a.new_empty(a.shape[0], b.shape[1], dtype=dtype)
    _fill_in_blocks(out, terms, None if add is None else add.expand(out.shape))
    return out


def multiply_into(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> None:
    """out = a @ b, or with `add` out += a @ b."""
    if _takes_blocks(a, b):
        _fill_in_blocks(out, [(a, b, 1.0)], out if add else None)
    elif add:
        out.addmm_(a, b)
    elif torch.compiler.is_compiling():
        out.copy_(a @ b)
    else:
        torch.mm(a, b, out=out)


def inner_dtype(a: Tensor, b: Tensor) -> torch.dtype:
    """What a @ b is kept in if it is a factor of the next product."""
    return accumulate_dtype(a) if _takes_blocks(a, b) else torch.promote_types(a.dtype, b.dtype)


def is_slow_in_torch(a: Tensor, b: Tensor) -> bool:
    """Whether blocks in float32 are ahead of torch's a @ b."""
    if a.dtype.itemsize != 2 or not a.is_cpu or b.dtype.itemsize != 2:
        return False
    if torch.compiler.is_compiling() or _multiplies_fast(a.dtype):
        return False
    # torch is ahead for one row if the columns of b lie one after another
    return a.shape[0] != 1 or b.stride(0) != 1


def _takes_blocks(a: Tensor, b: Tensor) -> bool:
    # with gradients enabled, what is computed is itself differentiated
    return is_slow_in_torch(a, b) and not torch.is_grad_enabled()


_multiplies_fast = cache(_torch.multiplies_fast)


def _by_torch(terms: Sequence[Term], dtype: torch.dtype, add: Tensor | None) -> Tensor:
    total = add
    for a, b, factor in terms:
        wide = a.dtype
        if wide is not b.dtype:
            wide = torch.promote_types(wide, b.dtype)
            a, b = a.to(wide), b.to(wide)
        if total is None:
            total = a @ b if factor == 1.0 else factor * (a @ b)
        elif total.dtype != wide:
            total = total + factor * (a @ b)
        elif total is add or not is_eager():
            total = torch.addmm(total, a, b, alpha=factor)
        else:
            total.addmm_(a, b, alpha=factor)
    assert total is not None
    return total if total.dtype is dtype else total.to(dtype)


def _fill_in_blocks(out: Tensor, terms: Sequence[Term], add: Tensor | None) -> None:
    """`add` has the shape of `out`, and may be `out`."""
    longest = max(1, *(a.shape[1] for a, _, _ in terms))
    for rows in _slices(out.shape[0], max(_LEAST[0], _HELD[0] // longest)):
        lefts = [a[rows].float() for a, _, _ in terms]
        for columns in _slices(out.shape[1], max(_LEAST[1], _HELD[1] // longest)):
            # a copy, because products are added in place
            total = None if add is None else add[rows, columns].to(torch.float32, copy=True)
            for left, (_, b, factor) in zip(lefts, terms, strict=True):
                right = b[:, columns].float()
                if total is None:
                    total = left @ right if factor == 1.0 else factor * (left @ right)
                else:
                    total.addmm_(left, right, alpha=factor)
            assert total is not None
            out[rows, columns] = total


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(i, min(length, i + size)) for i in range(0, length, size))
