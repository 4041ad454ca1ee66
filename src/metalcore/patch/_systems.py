# SPDX-License-Identifier: MIT
"""What takes the place of torch's solvers, inverses and determinants."""

from typing import Any

import torch
from torch import Tensor

from metalcore._op import Op
from metalcore.ops.linalg._systems import are_vectors
from metalcore.ops.linalg.lstsq import lstsq as our_lstsq
from metalcore.ops.linalg.pinv import by_kernels as our_pinv
from metalcore.patch._linalg import by_columns, is_square, takes, unless_failed
from metalcore.patch._replace import goes_with, records

_solve, _trsm, _cholesky_solve = Op.all["solve"], Op.all["trsm"], Op.all["cholesky_solve"]
_det = Op.all["det"]
_types: Any = torch.return_types


def _solution(A: Tensor, B: Any, left: Any) -> Any:
    if left is not True or not is_square(A) or not goes_with(A, B):
        return NotImplemented
    right = B.unsqueeze(-1) if are_vectors(A, B) else B
    if right.shape[:-1] != A.shape[:-1]:
        return NotImplemented
    # X is laid out as the right side is
    X, info = _solve(A, by_columns(right), False)
    return unless_failed((X if right is B else _vectors(X), info), info)


def _vectors(X: Tensor) -> Tensor:
    """[..., N, 1] as [..., N], which torch lays out as one more matrix."""
    x = X.squeeze(-1)
    return x if x.dim() == 1 else by_columns(x)


@takes("solve", (torch.linalg, "solve"), is_quick=True)
def _(A: Tensor, B: Any = None, *, left: Any = True) -> Any:
    found = _solution(A, B, left)
    return found if found is NotImplemented else found[0]


@takes("solve", (torch.linalg, "solve_ex"), is_quick=True)
def _(A: Tensor, B: Any = None, *, left: Any = True, check_errors: Any = False) -> Any:
    found = _solution(A, B, left) if A.is_cpu else NotImplemented
    return found if found is NotImplemented else _types.linalg_solve_ex(found)


def _inverse(A: Tensor) -> Any:
    if not is_square(A):
        return NotImplemented
    X, info = _solve(A, _identities(A), False)
    return unless_failed((X, info), info)


def _identities(A: Tensor) -> Tensor:
    """As right sides of A, laid out by columns."""
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    return eye.expand_as(A).contiguous().mT


@takes("inv", (torch, "inverse"), (Tensor, "inverse"), is_quick=True)
@takes("inv", (torch.linalg, "inv"), is_quick=True)
def _(A: Tensor) -> Any:
    found = _inverse(A)
    return found if found is NotImplemented else found[0]


@takes("inv", (torch.linalg, "inv_ex"), is_quick=True)
def _(A: Tensor, *, check_errors: Any = False) -> Any:
    found = _inverse(A) if A.is_cpu else NotImplemented
    return found if found is NotImplemented else _types.linalg_inv_ex(found)


@takes("pinv", (torch.linalg, "pinv"))
def _(A: Tensor, *, hermitian: Any = False, rtol: Any = None) -> Any:
    if not (rtol is None or type(rtol) is float) or type(hermitian) is not bool:
        return NotImplemented
    if hermitian and not is_square(A):
        return NotImplemented
    P = our_pinv(A, rtol, hermitian)
    # its gradient needs it as it is, torch's does not
    return P.clone() if P.requires_grad else P


@takes("lstsq", (torch.linalg, "lstsq"))
def _(A: Tensor, b: Any = None, rcond: Any = None, *, driver: Any = None) -> Any:
    if not goes_with(A, b) or b.dim() != A.dim() or b.shape[:-1] != A.shape[:-1]:
        return NotImplemented
    if not (rcond is None or type(rcond) is float) or driver not in (None, "gelsy", "gelsd"):
        return NotImplemented
    X, residuals, rank, S = our_lstsq(A, b, rcond)
    X = _in_columns_of(X, max(A.shape[-2:]))
    if driver != "gelsd":
        # which "gelsy" does not compute
        residuals, S = residuals.new_empty(0), S.new_empty(0)
    return _types.linalg_lstsq((X, residuals, rank, S))


def _in_columns_of(X: Tensor, rows: int) -> Tensor:
    """X [..., N, K] at the top of matrices with that many rows, which stand column by column."""
    if rows == X.shape[-2]:
        return by_columns(X)
    return torch.nn.functional.pad(X.mT, (0, rows - X.shape[-2])).mT[..., : X.shape[-2], :]


@takes("cholesky_solve", (torch, "cholesky_solve"), (Tensor, "cholesky_solve"))
def _(B: Tensor, L: Any = None, upper: Any = False) -> Any:
    # torch's gradient of L has another triangle too
    if not _are_systems(L, B) or type(upper) is not bool or records(L):
        return NotImplemented
    return _cholesky_solve(by_columns(B), L, upper)


@takes("cholesky_solve", (torch, "cholesky_inverse"), (Tensor, "cholesky_inverse"))
def _(L: Tensor, upper: Any = False) -> Any:
    if not is_square(L) or type(upper) is not bool or records(L):
        return NotImplemented
    return _cholesky_solve(_identities(L), L, upper)


@takes("trsm", (torch.linalg, "solve_triangular"), by=1, is_quick=True)
def _(A: Any, B: Tensor, *, upper: Any = None, left: Any = True, unitriangular: Any = False) -> Any:
    if left is not True or type(upper) is not bool or type(unitriangular) is not bool:
        return NotImplemented
    if not _are_systems(A, B):
        return NotImplemented
    return _trsm(A, by_columns(B), not upper, False, unitriangular)


def _are_systems(A: Any, B: Tensor) -> bool:
    """Whether A is square matrices for right sides B, in the same batch."""
    return goes_with(B, A) and A.dim() >= 2 and is_square(A) and A.shape[:-1] == B.shape[:-1]


@takes("det", (torch.linalg, "det"), (torch, "det"), (Tensor, "det"))
def _(A: Tensor) -> Any:
    if not is_square(A):
        return NotImplemented
    found = _det(A)[0]
    # of a singular matrix torch has other gradients
    return NotImplemented if records(A) and bool((found == 0).any()) else found


def _slogdet(kind: Any) -> Any:
    def body(A: Tensor) -> Any:
        if not is_square(A):
            return NotImplemented
        _, sign, logabsdet = _det(A)
        if records(A) and bool((sign == 0).any()):
            return NotImplemented
        return kind((sign, logabsdet))

    return body


takes("slogdet", (torch.linalg, "slogdet"))(_slogdet(_types.linalg_slogdet))
takes("slogdet", (torch, "slogdet"), (Tensor, "slogdet"))(_slogdet(_types.slogdet))
