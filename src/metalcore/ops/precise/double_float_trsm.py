# SPDX-License-Identifier: MIT
"""Triangular systems of DoubleFloats: A X = B."""

import torch
from torch import Tensor

from metalcore._accuracy import set_accuracy
from metalcore._op import Example, Op
from metalcore.ops.precise._pairs import joined, pair_dtype, random_pair, split

set_accuracy("double_float_trsm", 8.0)

forward = Op(
    "double_float_trsm(Tensor A, Tensor A_low, Tensor B, Tensor B_low, bool lower) "
    "-> (Tensor high, Tensor low)",
    batched=True,
    sharding="*NN, *NN, *Nk, *Nk -> *Nk, *Nk",
)
"""X of pairs [..., N, N] and [..., N, K]; the other triangle of A is not read."""


@forward.reference
def _(A: Tensor, A_low: Tensor, B: Tensor, B_low: Tensor, lower: bool) -> tuple[Tensor, Tensor]:
    X = torch.linalg.solve_triangular(joined(A, A_low), joined(B, B_low), upper=not lower)
    return split(X, A.dtype)


@forward.determines
def _(high: Tensor, low: Tensor) -> tuple[Tensor, ...]:
    return (joined(high, low),)


def _example(lower: bool) -> None:
    @forward.example
    def _(dtype: torch.dtype) -> Example:
        A, A_low = random_pair(2, 9, 9, dtype=pair_dtype(dtype))
        A = A / 9 + 2 * torch.eye(9)
        B, B_low = random_pair(2, 9, 5, dtype=A.dtype)
        return Example((A, A_low, B, B_low, lower), reduces_over=9)


_example(True)
_example(False)
