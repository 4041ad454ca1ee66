# SPDX-License-Identifier: MIT
"""Inverses: the solutions of A X = I."""

import torch
from torch import Tensor

from metalcore._check import expect_factored, expect_float, expect_square
from metalcore._route import Matrices
from metalcore._sharding import replicated
from metalcore.ops.linalg._precision import doubled, is_double
from metalcore.ops.linalg.solve import forward

_route = Matrices("inv", square=True)


def inv(
    A: Tensor, *, check: bool = True, precision: str | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Inverse of each matrix of a batch. `solve(A, B)` is faster and more accurate than inv(A) @ B.

    Args:
        A: square matrices, [..., N, N].
        check: raise where A is singular. Without it nothing waits for the result.
        precision: `"float64"` computes and returns float64: on a GPU, which has none, a
            `metalcore.precise.DoubleFloat` of 48 bits.

    Returns:
        [..., N, N]; with `check=False` also info [...] (int32): 0, or the number of the first pivot
        that is zero.

    Example:
        >>> X = metalcore.inv(torch.randn(200, 32, 32))
    """
    if is_double(precision, A):
        double, A = doubled("inv", precision, A=A)
        if double is not None:
            expect_square("inv", "A", A)
            return double.solve("inv", A, double.identity(A), check)  # type: ignore[no-any-return]
    expect_float("inv", A=A)
    expect_square("inv", "A", A)
    if _route.prefers_torch(A):
        X, info = _route.by_torch(torch.linalg.inv_ex, A)
    else:
        eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
        X, info = forward(A, replicated(eye, A).expand_as(A), False)
    if not check:
        return X, info
    way_out = "Use metalcore.pinv for singular matrices."
    expect_factored("inv", info, "linalg.inv", way_out)
    return X  # type: ignore[no-any-return]
