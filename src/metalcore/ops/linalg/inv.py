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


# rows from and up to which a single matrix is not inverted faster by LAPACK
_ALONE_FROM, _ALONE_UP_TO = 12, 32


def _torch_is_ahead(A: Tensor) -> bool:
    size = A.shape
    if len(size) < 2 or size[-1] != size[-2]:
        return False
    alone = A.numel() == size[-1] ** 2 and not _ALONE_FROM <= size[-1] <= _ALONE_UP_TO
    return (alone and A.dtype in LAPACK_TYPES) or torch_is_ahead("solve", A)


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
