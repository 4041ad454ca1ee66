# SPDX-License-Identifier: MIT
"""Rank: the number of singular values that count."""

import torch
from torch import Tensor

from metalcore._check import expect_float, expect_matrix, expect_square
from metalcore._op import accumulate
from metalcore.ops.linalg.eigh import eigvalsh
from metalcore.ops.linalg.svd import svdvals


def matrix_rank(
    A: Tensor,
    *,
    atol: float | Tensor | None = None,
    rtol: float | Tensor | None = None,
    hermitian: bool = False,
) -> Tensor:
    """Rank of each matrix of a batch: the number of singular values greater than
    max(atol, rtol * the largest).

    Args:
        A: [..., M, N].
        atol: default 0; a number, or [...].
        rtol: default max(M, N) times the machine epsilon, or 0 where `atol` is positive.
        hermitian: A is symmetric, which is not checked: the eigenvalues of its lower triangle are
            taken.

    Returns:
        [...] (int64).

    Example:
        >>> metalcore.matrix_rank(torch.ones(3, 3))
        tensor(1)
    """
    expect_float("matrix_rank", A=A)
    (expect_square if hermitian else expect_matrix)("matrix_rank", "A", A)
    X = accumulate(A.detach())
    S: Tensor = eigvalsh(X).abs() if hermitian else svdvals(X)  # type: ignore[union-attr]
    if S.shape[-1] == 0:
        return torch.zeros(A.shape[:-2], dtype=torch.int64, device=A.device)
    default = max(A.shape[-2:]) * float(torch.finfo(S.dtype).eps)
    if atol is None and rtol is None:
        return (default * S.amax(-1, keepdim=True) < S).sum(-1)
    absolute = torch.as_tensor(0.0 if atol is None else atol, dtype=S.dtype, device=S.device)
    if rtol is None:
        relative = torch.where(absolute > 0, 0.0, default).to(S.dtype)
    else:
        relative = torch.as_tensor(rtol, dtype=S.dtype, device=S.device)
    level = torch.maximum(absolute, relative * S.amax(-1))
    return (level[..., None] < S).sum(-1)
