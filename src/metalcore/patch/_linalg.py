# SPDX-License-Identifier: MIT
"""What takes the place of torch.linalg's decompositions and solvers.

A matrix that has no result (singular, not positive definite, NaN) sends the call back to torch,
which then raises its own error or returns what it returns. To know, the CPU waits for a GPU, as
torch does too, but for the functions ..._ex: these are taken on the CPU alone.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from metalcore import _native
from metalcore._check import LinAlgError
from metalcore._op import Op
from metalcore._route import Route
from metalcore.ops.linalg._systems import are_vectors
from metalcore.ops.linalg.lstsq import lstsq as our_lstsq
from metalcore.ops.linalg.pinv import by_kernels as our_pinv
from metalcore.patch._replace import (
    Function,
    compute,
    goes_with,
    is_ours,
    records,
    replaces,
)

_cholesky, _qr, _solve = Op.all["cholesky"], Op.all["qr"], Op.all["solve"]
_eigh, _eigvalsh = Op.all["eigh"], Op.all["eigvalsh"]
_svd, _svdvals = Op.all["svd"], Op.all["svdvals"]
_types: Any = torch.return_types


def _replaces(op: str, *places: tuple[Any, str]) -> Callable[[Function], Function]:
    """Attach `body(A, ...)`, which may return NotImplemented, to places; the route of `op` decides.

    The other parameters of `body` have torch's names. A call with one that it does not have, or
    that names A, is torch's.
    """
    route = Route.all[op]

    def attach(body: Function) -> Function:
        parameters = [*inspect.signature(body).parameters.values()][1:]
        known = {p.name for p in parameters}
        most = 1 + sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)

        def make(original: Function) -> Function:
            def replacement(*args: Any, **named: Any) -> Any:
                if (
                    0 < len(args) <= most
                    and (not named or named.keys() <= known)
                    and is_ours("linalg", route, args[0])
                ):
                    try:
                        results = compute(body, *args, **named)
                    except LinAlgError:
                        # torch says it in its own words
                        results = NotImplemented
                    if results is not NotImplemented:
                        return results
                return original(*args, **named)

            return replacement

        replaces("linalg", *places)(make)
        return body

    return attach


def _unless_failed(results: Any, info: Tensor) -> Any:
    return NotImplemented if _native.any_nonzero(info) else results


def _is_square(A: Tensor) -> bool:
    return A.shape[-1] == A.shape[-2]


@_replaces("cholesky", (torch.linalg, "cholesky"))
def _(A: Tensor, *, upper: Any = False) -> Any:
    if not _is_square(A) or type(upper) is not bool:
        return NotImplemented
    factor, info = _cholesky(A, upper)
    return _unless_failed(factor, info)


@_replaces("cholesky", (torch.linalg, "cholesky_ex"))
def _(A: Tensor, *, upper: Any = False, check_errors: Any = False) -> Any:
    if not A.is_cpu or not _is_square(A) or type(upper) is not bool:
        return NotImplemented
    factor, info = _cholesky(A, upper)
    return _unless_failed(_types.linalg_cholesky_ex((factor, info)), info)


@_replaces("qr", (torch.linalg, "qr"))
def _(A: Tensor, mode: Any = "reduced") -> Any:
    # torch says what has no gradient
    if mode not in ("reduced", "complete", "r") or (mode != "reduced" and records(A)):
        return NotImplemented
    Q, R = _qr(A, mode)
    return _types.linalg_qr((R.new_empty(0) if mode == "r" else Q, R))


def _solution(A: Tensor, B: Any, left: Any) -> Any:
    if left is not True or not _is_square(A) or not goes_with(A, B):
        return NotImplemented
    right = B.unsqueeze(-1) if are_vectors(A, B) else B
    if right.shape[:-1] != A.shape[:-1]:
        return NotImplemented
    X, info = _solve(A, right, False)
    return _unless_failed((X if right is B else X.squeeze(-1), info), info)


@_replaces("solve", (torch.linalg, "solve"))
def _(A: Tensor, B: Any = None, *, left: Any = True) -> Any:
    found = _solution(A, B, left)
    return found if found is NotImplemented else found[0]


@_replaces("solve", (torch.linalg, "solve_ex"))
def _(A: Tensor, B: Any = None, *, left: Any = True, check_errors: Any = False) -> Any:
    found = _solution(A, B, left) if A.is_cpu else NotImplemented
    return found if found is NotImplemented else _types.linalg_solve_ex(found)


def _inverse(A: Tensor) -> Any:
    if not _is_square(A):
        return NotImplemented
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    X, info = _solve(A, eye.expand_as(A), False)
    return _unless_failed((X, info), info)


@_replaces("inv", (torch, "inverse"), (Tensor, "inverse"))
@_replaces("inv", (torch.linalg, "inv"))
def _(A: Tensor) -> Any:
    found = _inverse(A)
    return found if found is NotImplemented else found[0]


@_replaces("inv", (torch.linalg, "inv_ex"))
def _(A: Tensor, *, check_errors: Any = False) -> Any:
    found = _inverse(A) if A.is_cpu else NotImplemented
    return found if found is NotImplemented else _types.linalg_inv_ex(found)


@_replaces("eigh", (torch.linalg, "eigh"))
def _(A: Tensor, UPLO: Any = "L") -> Any:
    if not _is_square(A) or UPLO not in ("L", "U"):
        return NotImplemented
    L, Q, info = _eigh(A, UPLO == "U")
    return _unless_failed(_types.linalg_eigh((L, Q)), info)


@_replaces("eigvalsh", (torch.linalg, "eigvalsh"))
def _(A: Tensor, UPLO: Any = "L") -> Any:
    if not _is_square(A) or UPLO not in ("L", "U"):
        return NotImplemented
    # the gradient needs the vectors
    if records(A):
        L, _, info = _eigh(A, UPLO == "U")
    else:
        L, info = _eigvalsh(A, UPLO == "U")
    return _unless_failed(L, info)


@_replaces("svd", (torch.linalg, "svd"))
def _(A: Tensor, full_matrices: Any = True) -> Any:
    if type(full_matrices) is not bool:
        return NotImplemented
    U, S, V, info = _svd(A, full_matrices)
    return _unless_failed(_types.linalg_svd((U, S, V.mT)), info)


@_replaces("svdvals", (torch.linalg, "svdvals"))
def _(A: Tensor) -> Any:
    if records(A):
        _, S, _, info = _svd(A, False)
    else:
        S, info = _svdvals(A)
    return _unless_failed(S, info)


@_replaces("pinv", (torch.linalg, "pinv"))
def _(A: Tensor, *, hermitian: Any = False, rtol: Any = None) -> Any:
    if not (rtol is None or type(rtol) is float) or type(hermitian) is not bool:
        return NotImplemented
    if hermitian and not _is_square(A):
        return NotImplemented
    P = our_pinv(A, rtol, hermitian)
    # its gradient needs it as it is, torch's does not
    return P.clone() if P.requires_grad else P


@_replaces("lstsq", (torch.linalg, "lstsq"))
def _(A: Tensor, b: Any = None, rcond: Any = None, *, driver: Any = None) -> Any:
    if not goes_with(A, b) or b.dim() != A.dim() or b.shape[:-1] != A.shape[:-1]:
        return NotImplemented
    if not (rcond is None or type(rcond) is float) or driver not in (None, "gelsy", "gelsd"):
        return NotImplemented
    X, residuals, rank, S = our_lstsq(A, b, rcond)
    if driver != "gelsd":
        # which "gelsy" does not compute
        residuals, S = residuals.new_empty(0), S.new_empty(0)
    return _types.linalg_lstsq((X, residuals, rank, S))
