# SPDX-License-Identifier: MIT
"""Products of matrices of DoubleFloats, and what such products leave of others."""

from typing import Any

import torch
from torch import Tensor

from metalcore._op import Example, Op
from metalcore.ops.precise._pairs import joined, pair_dtype, random_pair, split

forward = Op(
    "double_float_matmul(Tensor A, Tensor A_low, Tensor B, Tensor B_low, Tensor? C, Tensor? C_low, "
    "Tensor? D, Tensor? D_low) -> (Tensor high, Tensor low)",
    batched=True,
    sharding="*mK, *mK, *Kn, *Kn, *mn, *mn, *mn, *mn -> *mn, *mn",
)
"""A B, or C - D - A B, of pairs [..., M, K] and [..., K, N]. The latter is as near to the truth
where all of it cancels."""


@forward.reference
def _(
    A: Tensor,
    A_low: Tensor,
    B: Tensor,
    B_low: Tensor,
    C: Tensor | None,
    C_low: Tensor | None,
    D: Tensor | None,
    D_low: Tensor | None,
) -> tuple[Tensor, Tensor]:
    product = joined(A, A_low) @ joined(B, B_low)
    if C is None or C_low is None or D is None or D_low is None:
        return split(product, A.dtype)
    return split(joined(C, C_low) - joined(D, D_low) - product, A.dtype)


@forward.determines
def _(high: Tensor, low: Tensor) -> tuple[Tensor, ...]:
    return (joined(high, low),)


def _example(sizes: tuple[tuple[int, ...], ...]) -> None:
    @forward.example
    def _(dtype: torch.dtype) -> Example:
        args: list[Any] = []
        for size in sizes:
            args += random_pair(*size, dtype=pair_dtype(dtype))
        return Example((*args, *[None] * (8 - len(args))), reduces_over=19)


_example(((2, 17, 19), (2, 19, 5)))
_example(((17, 19), (19, 5), (17, 5), (17, 5)))
