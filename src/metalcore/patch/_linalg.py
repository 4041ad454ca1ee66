# SPDX-License-Identifier: MIT
"""What takes the place of torch.linalg's decompositions and solvers.

Batches of small matrices are taken, and single large ones on the CPU where a kernel has an
algorithm for them.
A matrix that has no result (singular, not positive definite, NaN) sends the call back to torch,
which then raises its own error or returns what it returns. To know, the CPU waits for a GPU, as
torch does too, but for the functions ..._ex: these are taken on the CPU alone.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metalcore import _native
from metalcore._check import LinAlgError
from metalcore._op import Op
from metalcore._policy import policy
from metalcore.ops.linalg._systems import are_vectors
from metalcore.ops.linalg.lstsq import lstsq as our_lstsq
from metalcore.ops.linalg.pinv import by_kernels as our_pinv
from metalcore.patch._replace import (
    ABSENT,
    PLAIN,
    Function,
    compiling,
    compute,
    goes_with,
    may_replace,
    records,
    replaces,
)

_DTYPES = (torch.float32, torch.float64)
_cholesky, _qr, _solve = Op.all["cholesky"], Op.all["qr"], Op.all["solve"]
_eigh, _eigvalsh = Op.all["eigh"], Op.all["eigvalsh"]
_svd, _svdvals = Op.all["svd"], Op.all["svdvals"]
_types: Any = torch.return_types


class Limits(NamedTuple):
    """Which matrices are taken: `[override]` of an op's TOML file."""

    batch_from: int
    values_from: int
    side_up_to: int
    side_per_matrix: int
    # single matrices, by their shorter side: float32 with one side twice the other, other float32
    # ones, float64; 0 for none
    alone_from: int = 0
    alone_square_from: int = 0
    alone_double_from: int = 0

    @property
    def takes_single_ones(self) -> bool:
        return any((self.alone_from, self.alone_square_from, self.alone_double_from))


LIMITS = {
    name: Limits(**policy(name, "override"))
    for name in (
        *("cholesky", "eigh", "eigvalsh", "inv", "lstsq", "pinv", "qr", "solve", "svd", "svdvals"),
    )
}
SCOPE = {
    "ABSENT": ABSENT,
    "PLAIN": PLAIN,
    "compiling": compiling,
    # smaller ones are looked at no further
    "VALUES_FROM": min(limits.values_from for limits in LIMITS.values()),
}


def _is_worth_it(name: str, A: Tensor) -> bool:
    limits = LIMITS[name]
    *batch, m, n = A.shape
    side = max(m, n)
    if not batch:
        short = min(m, n)
        least = limits.alone_from if side >= 2 * short else limits.alone_square_from
        if A.dtype is torch.float64:
            least = limits.alone_double_from
        return 0 < least <= short and A.is_cpu
    values = A.numel()
    return (
        values >= limits.values_from
        and side <= limits.side_up_to
        and values >= m * n * max(limits.batch_from, side / limits.side_per_matrix)
    )


# One parameter for each argument, because `**named` would double what a declined call costs.
_SOURCE = """
def make(original, try_ours, pass_on):
    def call({parameters}):
        if (
            type({A}) in PLAIN
            and {A}.dim() >= {rank}
            and not compiling()
            and type(n := {A}.numel()) is int
            and n >= VALUES_FROM
        ):
            results = try_ours({A}, {rest})
            if results is not NotImplemented:
                return results
        if {A} is not ABSENT and {named} is ABSENT:
            return {plain}
        return pass_on(original, {A}, {rest})
    return call
"""


def _replaces(limits: str, *places: tuple[Any, str], takes: str) -> Callable[[Function], Function]:
    """Attach `body(A, ...)`, which may return NotImplemented, to places.

    `limits` is whose limits count. `takes` are torch's names for all arguments; a call with one
    that `body` does not have is torch's.
    """
    A, *rest = (name.strip() for name in takes.replace("*,", "").split(","))
    second = takes.split(", ")[1] != "*"
    source = _SOURCE.format(
        A=A,
        rest=", ".join(rest),
        rank=2 if LIMITS[limits].takes_single_ones else 3,
        parameters=re.sub(r"(\w+)", r"\1=ABSENT", takes),
        named=" is ".join(rest[second:]),
        plain=f"original({A}) if {rest[0]} is ABSENT else original({A}, {rest[0]})"
        if second
        else f"original({A})",
    )

    def attach(body: Function) -> Function:
        known = inspect.signature(body).parameters.keys()

        def try_ours(A: Tensor, *values: Any) -> Any:
            given = {n: v for n, v in zip(rest, values, strict=True) if v is not ABSENT}
            if not (
                given.keys() <= known
                and _is_worth_it(limits, A)
                and A.dtype in _DTYPES
                and may_replace("linalg", A)
            ):
                return NotImplemented
            try:
                return compute(lambda: body(A, **given))
            except LinAlgError:
                # torch says it in its own words
                return NotImplemented

        def pass_on(original: Function, A: Any, *values: Any) -> Any:
            given = {n: v for n, v in zip(rest, values, strict=True) if v is not ABSENT}
            return original(*(() if A is ABSENT else (A,)), **given)

        found: dict[str, Any] = {}
        exec(compile(source, f"<metalcore {places[0][1]}>", "exec"), SCOPE, found)
        replaces("linalg", *places)(lambda original: found["make"](original, try_ours, pass_on))
        return body

    return attach


def _unless_failed(results: Any, info: Tensor) -> Any:
    return NotImplemented if _native.any_nonzero(info) else results


def _is_square(A: Tensor) -> bool:
    return A.shape[-1] == A.shape[-2]


@_replaces("cholesky", (torch.linalg, "cholesky"), takes="input, *, upper, out")
def _(A: Tensor, upper: Any = False) -> Any:
    if not _is_square(A) or type(upper) is not bool:
        return NotImplemented
    factor, info = _cholesky(A, upper)
    return _unless_failed(factor, info)


@_replaces("cholesky", (torch.linalg, "cholesky_ex"), takes="input, *, upper, check_errors, out")
def _(A: Tensor, upper: Any = False, check_errors: Any = False) -> Any:
    if not A.is_cpu or not _is_square(A) or type(upper) is not bool:
        return NotImplemented
    factor, info = _cholesky(A, upper)
    return _unless_failed(_types.linalg_cholesky_ex((factor, info)), info)


@_replaces("qr", (torch.linalg, "qr"), takes="A, mode, *, out")
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


@_replaces("solve", (torch.linalg, "solve"), takes="A, B, *, left, out")
def _(A: Tensor, B: Any = None, left: Any = True) -> Any:
    found = _solution(A, B, left)
    return found if found is NotImplemented else found[0]


@_replaces("solve", (torch.linalg, "solve_ex"), takes="A, B, *, left, check_errors, out")
def _(A: Tensor, B: Any = None, left: Any = True, check_errors: Any = False) -> Any:
    found = _solution(A, B, left) if A.is_cpu else NotImplemented
    return found if found is NotImplemented else _types.linalg_solve_ex(found)


def _inverse(A: Tensor) -> Any:
    if not _is_square(A):
        return NotImplemented
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    X, info = _solve(A, eye.expand_as(A), False)
    return _unless_failed((X, info), info)


@_replaces("inv", (torch, "inverse"), (Tensor, "inverse"), takes="input, *, out")
@_replaces("inv", (torch.linalg, "inv"), takes="A, *, out")
def _(A: Tensor) -> Any:
    found = _inverse(A)
    return found if found is NotImplemented else found[0]


@_replaces("inv", (torch.linalg, "inv_ex"), takes="A, *, check_errors, out")
def _(A: Tensor, check_errors: Any = False) -> Any:
    found = _inverse(A) if A.is_cpu else NotImplemented
    return found if found is NotImplemented else _types.linalg_inv_ex(found)


@_replaces("eigh", (torch.linalg, "eigh"), takes="input, UPLO, *, out")
def _(A: Tensor, UPLO: Any = "L") -> Any:
    if not _is_square(A) or UPLO not in ("L", "U"):
        return NotImplemented
    L, Q, info = _eigh(A, UPLO == "U")
    return _unless_failed(_types.linalg_eigh((L, Q)), info)


@_replaces("eigvalsh", (torch.linalg, "eigvalsh"), takes="input, UPLO, *, out")
def _(A: Tensor, UPLO: Any = "L") -> Any:
    if not _is_square(A) or UPLO not in ("L", "U"):
        return NotImplemented
    # the gradient needs the vectors
    if records(A):
        if A.dim() == 2:
            return NotImplemented
        L, _, info = _eigh(A, UPLO == "U")
    else:
        L, info = _eigvalsh(A, UPLO == "U")
    return _unless_failed(L, info)


@_replaces("svd", (torch.linalg, "svd"), takes="A, full_matrices, *, driver, out")
def _(A: Tensor, full_matrices: Any = True) -> Any:
    if type(full_matrices) is not bool:
        return NotImplemented
    U, S, V, info = _svd(A, full_matrices)
    return _unless_failed(_types.linalg_svd((U, S, V.mT)), info)


@_replaces("svdvals", (torch.linalg, "svdvals"), takes="A, *, driver, out")
def _(A: Tensor) -> Any:
    if records(A):
        if A.dim() == 2:
            return NotImplemented
        _, S, _, info = _svd(A, False)
    else:
        S, info = _svdvals(A)
    return _unless_failed(S, info)


@_replaces("pinv", (torch.linalg, "pinv"), takes="input, rcond, hermitian, *, atol, rtol, out")
def _(A: Tensor, hermitian: Any = False, rtol: Any = None) -> Any:
    if not (rtol is None or type(rtol) is float) or type(hermitian) is not bool:
        return NotImplemented
    if hermitian and not _is_square(A):
        return NotImplemented
    P = our_pinv(A, rtol, hermitian)
    # its gradient needs it as it is, torch's does not
    return P.clone() if P.requires_grad else P


@_replaces("lstsq", (torch.linalg, "lstsq"), takes="input, b, rcond, *, driver")
def _(A: Tensor, b: Any = None, rcond: Any = None, driver: Any = None) -> Any:
    if not goes_with(A, b) or b.dim() != A.dim() or b.shape[:-1] != A.shape[:-1]:
        return NotImplemented
    if not (rcond is None or type(rcond) is float) or driver not in (None, "gelsy", "gelsd"):
        return NotImplemented
    X, residuals, rank, S = our_lstsq(A, b, rcond)
    if driver != "gelsd":
        # which "gelsy" does not compute
        residuals, S = residuals.new_empty(0), S.new_empty(0)
    return _types.linalg_lstsq((X, residuals, rank, S))
