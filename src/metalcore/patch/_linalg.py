# SPDX-License-Identifier: MIT
"""What takes the place of torch.linalg's decompositions, and how its functions are taken.

A matrix that has no result (singular, not positive definite, NaN) sends the call back to torch,
which then raises its own error or returns what it returns. To know, the CPU waits for a GPU, as
torch does too, but for the functions ..._ex: these are taken on the CPU alone. Results have the
strides of torch's: those of LAPACK stand column by column.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from metalcore import _native, _torch
from metalcore._check import LinAlgError
from metalcore._op import Op
from metalcore._policy import policy, when_changed
from metalcore._route import Route
from metalcore.patch._replace import Function, compute, is_ours, records, replaces

_cholesky, _qr, _lu = Op.all["cholesky"], Op.all["qr"], Op.all["lu"]
_eigh, _eigvalsh = Op.all["eigh"], Op.all["eigvalsh"]
_svd, _svdvals = Op.all["svd"], Op.all["svdvals"]
_types: Any = torch.return_types


# `quick_values`: the fewest for which torch's quick functions are left. `solve` of 4 x 4 x 500
# gains 1.2x and of 4 x 4 x 100 loses as much, on one thread of an AVX-512 CPU.
_numbers: dict[str, int] = {}


@when_changed
def _read_numbers() -> None:
    _numbers.update(policy("overrides", "cpu", quick_values=4096))


_read_numbers()


def takes(
    op: str, *places: tuple[Any, str], by: int = 0, is_quick: bool = False
) -> Callable[[Function], Function]:
    """Attach `body(A, ...)`, which may return NotImplemented, to places; the route of `op` decides
    by argument number `by`. Where torch `is_quick`, small batches are not worth the question.

    The other parameters of `body` have torch's names. A call with one that it does not have, unless
    it is None where torch takes None for absent, or one that names A, is torch's.
    """
    route = Route.all[op]

    def attach(body: Function) -> Function:
        parameters = [*inspect.signature(body).parameters.values()][1:]
        known = {p.name for p in parameters}
        most = 1 + sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)

        def make(original: Function) -> Function:
            optional = _torch.optional_arguments(original)

            def replacement(*args: Any, **named: Any) -> Any:
                least = _numbers["quick_values"] if is_quick else 0
                if by < len(args) <= most and is_ours("linalg", route, args[by], least=least):
                    given = {n: v for n, v in named.items() if v is not None or n not in optional}
                    if given.keys() <= known:
                        try:
                            results = compute(body, *args, **given)
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


def unless_failed(results: Any, info: Tensor) -> Any:
    return NotImplemented if _native.any_nonzero(info) else results


def is_square(A: Tensor) -> bool:
    return A.shape[-1] == A.shape[-2]


def by_columns(X: Tensor) -> Tensor:
    """X as LAPACK lays matrices out."""
    columns = X.mT
    return X if columns.is_contiguous() else columns.contiguous().mT


def _factor(A: Tensor, upper: bool) -> tuple[Tensor, Tensor]:
    """The rows of one triangle's factor are the columns of the other's."""
    factor, info = _cholesky(A.mT, not upper)
    return factor.mT, info


@takes("cholesky", (torch.linalg, "cholesky"), is_quick=True)
def _(A: Tensor, *, upper: Any = False) -> Any:
    if not is_square(A) or type(upper) is not bool:
        return NotImplemented
    factor, info = _factor(A, upper)
    return unless_failed(factor, info)


@takes("cholesky", (torch.linalg, "cholesky_ex"), is_quick=True)
def _(A: Tensor, *, upper: Any = False, check_errors: Any = False) -> Any:
    if not A.is_cpu or not is_square(A) or type(upper) is not bool:
        return NotImplemented
    factor, info = _factor(A, upper)
    return unless_failed(_types.linalg_cholesky_ex((factor, info)), info)


@takes("qr", (torch.linalg, "qr"))
def _(A: Tensor, mode: Any = "reduced") -> Any:
    # torch says what has no gradient
    if mode not in ("reduced", "complete", "r") or (mode != "reduced" and records(A)):
        return NotImplemented
    Q, R = _qr(A, mode)
    return _types.linalg_qr((R.new_empty(0) if mode == "r" else by_columns(Q), by_columns(R)))


@takes("eigh", (torch.linalg, "eigh"))
def _(A: Tensor, UPLO: Any = "L") -> Any:
    if not is_square(A) or UPLO not in ("L", "U"):
        return NotImplemented
    L, Q, info = _eigh(A, UPLO == "U")
    return unless_failed(_types.linalg_eigh((L, by_columns(Q))), info)


@takes("eigvalsh", (torch.linalg, "eigvalsh"))
def _(A: Tensor, UPLO: Any = "L") -> Any:
    if not is_square(A) or UPLO not in ("L", "U"):
        return NotImplemented
    # the gradient needs the vectors
    if records(A):
        L, _, info = _eigh(A, UPLO == "U")
    else:
        L, info = _eigvalsh(A, UPLO == "U")
    return unless_failed(L, info)


@takes("svd", (torch.linalg, "svd"))
def _(A: Tensor, full_matrices: Any = True) -> Any:
    if type(full_matrices) is not bool:
        return NotImplemented
    U, S, V, info = _svd(A, full_matrices)
    return unless_failed(_types.linalg_svd((by_columns(U), S, V.mT)), info)


@takes("svdvals", (torch.linalg, "svdvals"))
def _(A: Tensor) -> Any:
    if records(A):
        _, S, _, info = _svd(A, False)
    else:
        S, info = _svdvals(A)
    return unless_failed(S, info)


@takes("lu", (torch.linalg, "lu"))
def _(A: Tensor, *, pivot: Any = True) -> Any:
    if pivot is not True:
        return NotImplemented
    return _types.linalg_lu(_lu(A))
