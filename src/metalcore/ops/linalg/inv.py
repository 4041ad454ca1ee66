# SPDX-License-Identifier: MIT
"""Inverses: the solutions of A X = I."""

import torch
from torch import Tensor

from metalcore._check import (
    LAPACK_TYPES,
    LinAlgError,
    expect_factored,
    expect_float,
    expect_square,
    explain,
)
from metalcore._trace import left_to_torch
from metalcore.ops.linalg.lu import torch_is_ahead
from metalcore.ops.linalg.solve import forward

_WAY_OUT = "Use metalcore.pinv for singular matrices."


# rows from which LAPACK inverts a single matrix faster
_ALONE_UP_TO = 32


def _torch_is_ahead(A: Tensor) -> bool:
    alone = A.dim() == 2 and A.shape[0] > _ALONE_UP_TO and A.dtype in LAPACK_TYPES
    return (alone or torch_is_ahead("solve", A)) and A.shape[-2] == A.shape[-1]


def inv(A: Tensor, *, check: bool = True) -> Tensor | tuple[Tensor, Tensor]:
    """Inverse of each matrix of a batch. `solve(A, B)` is faster and more accurate than inv(A) @ B.

    Args:
        A: square matrices, [..., N, N].
        check: raise where A is singular. Without it nothing waits for the result.

    Returns:
        [..., N, N]; with `check=False` also info [...] (int32): 0, or the number of the first pivot
        that is zero.

    Example:
        >>> X = metalcore.inv(torch.randn(200, 32, 32))
    """
    if check and _torch_is_ahead(A) and left_to_torch("inv", A):
        try:
            return torch.linalg.inv(A)  # type: ignore[no-any-return]
        except LinAlgError as error:
            explain("inv", error, _WAY_OUT)
    expect_float("inv", A=A)
    expect_square("inv", "A", A)
    X, info = forward(A, torch.eye(A.shape[-1], dtype=A.dtype, device=A.device).expand_as(A), False)
    if not check:
        return X, info
    expect_factored("inv", info, "linalg.inv", _WAY_OUT)
    return X  # type: ignore[no-any-return]
