# SPDX-License-Identifier: MIT
"""What takes the place of torch's functions of singular values: rank, condition and norms."""

import math
from typing import Any

import torch
from torch import Tensor

from metalcore._op import Op
from metalcore.patch._linalg import takes, unless_failed
from metalcore.patch._replace import records

_svd, _svdvals, _eigvalsh = Op.all["svd"], Op.all["svdvals"], Op.all["eigvalsh"]


def _values(A: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values and info; the gradient needs the vectors."""
    if records(A):
        _, S, _, info = _svd(A, False)
        return S, info
    S, info = _svdvals(A)
    return S, info


@takes("svdvals", (torch.linalg, "matrix_rank"))
def _(A: Tensor, *, atol: Any = None, rtol: Any = None, hermitian: Any = False) -> Any:
    numbers = (float, type(None))
    if type(hermitian) is not bool or type(atol) not in numbers or type(rtol) not in numbers:
        return NotImplemented
    if A.numel() == 0 or (hermitian and A.shape[-1] != A.shape[-2]):
        return NotImplemented
    S, info = _eigvalsh(A.detach(), False) if hermitian else _svdvals(A.detach())
    S = S.abs()
    if rtol is None:
        rtol = 0.0 if atol else max(A.shape[-2:]) * torch.finfo(A.dtype).eps
    level = (rtol * S.amax(-1, keepdim=True)).clamp(min=atol or 0.0)
    return unless_failed((level < S).sum(-1), info)


@takes("svdvals", (torch.linalg, "cond"))
def _(A: Tensor, p: Any = None) -> Any:
    if A.numel() == 0 or not (p is None or (type(p) in (int, float) and p in (2, -2))):
        return NotImplemented
    S, info = _values(A)
    first, last = S[..., 0], S[..., -1]
    return unless_failed(last / first if p == -2 else first / last, info)


@takes("svdvals", (torch.linalg, "matrix_norm"))
def _(A: Tensor, ord: Any = "fro", dim: Any = (-2, -1), keepdim: Any = False) -> Any:
    is_ours = ord == "nuc" or (type(ord) in (int, float) and math.fabs(ord) == 2)
    if not is_ours or A.numel() == 0 or type(keepdim) is not bool:
        return NotImplemented
    if type(dim) not in (tuple, list) or tuple(dim) not in ((-2, -1), (A.dim() - 2, A.dim() - 1)):
        return NotImplemented
    S, info = _values(A)
    norm = S.sum(-1) if ord == "nuc" else S.amax(-1) if ord == 2 else S.amin(-1)
    return unless_failed(norm[..., None, None] if keepdim else norm, info)
