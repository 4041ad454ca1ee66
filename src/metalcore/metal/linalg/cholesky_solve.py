# SPDX-License-Identifier: MIT
"""Launches of cholesky_solve."""

from torch import Tensor

from metalcore._policy import Values
from metalcore.metal.launch import Call, Planned, Step, metal_kernel
from metalcore.metal.linalg import trsm


@metal_kernel("cholesky_solve")
def plan(_: Values, B: Tensor, L: Tensor, upper: bool) -> Planned | None:
    def solve(L: Tensor, B: Tensor, X: Tensor) -> list[Step]:
        n = X.shape[-2]
        if n <= trsm.BLOCK:
            return [trsm.block("cholesky_solve", L, B, X, 0, n, (not upper, upper, False))]
        return [
            Call(X.copy_, (B,)),
            *trsm.steps(L, X, lower=not upper, transpose=upper),
            *trsm.steps(L, X, lower=not upper, transpose=not upper),
        ]

    return trsm.planned(L, B, solve)
