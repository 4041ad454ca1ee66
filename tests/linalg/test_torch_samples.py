# SPDX-License-Identifier: MIT
"""torch's own sample inputs for its linear algebra, through our functions, forward and backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.opinfo.core import OpInfo
from torch.testing._internal.opinfo.definitions.linalg import op_db

import metalcore
from metalcore._accuracy import error, tolerance
from tests.samples import of, results


def _svd(A: Tensor, full_matrices: bool = True) -> Any:
    U, S, V = metalcore.svd(A, full_matrices)
    return torch.return_types.linalg_svd((U, S, V.mT))


def _lstsq(A: Tensor, B: Tensor, rcond: float | None = None, *, driver: str | None = None) -> Any:
    X, residuals, rank, S = metalcore.lstsq(A, B, rcond)
    # what the driver of LAPACK does not compute
    if driver == "gels":
        rank = rank.new_empty(0)
    if driver in {"gels", "gelsy"}:
        S = S.new_empty(0)
    if driver == "gelsy":
        residuals = residuals.new_empty(0)
    return X, residuals, rank, S


def _solve_triangular(
    A: Tensor, B: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    if left:
        return metalcore.trsm(A, B, lower=not upper, unit_diagonal=unitriangular)
    X = metalcore.trsm(A, B.mT, lower=not upper, transpose=True, unit_diagonal=unitriangular)
    return X.mT


def _pinv(A: Tensor, *, rtol: float | Tensor | None = None, hermitian: bool = False) -> Tensor:
    return metalcore.pinv(A, rcond=rtol, hermitian=hermitian)


OURS: dict[str, Callable[..., Any]] = {
    "linalg.cholesky": metalcore.cholesky,
    "linalg.cholesky_ex": lambda A, upper=False: metalcore.cholesky(A, upper=upper, check=False),
    "linalg.cond": metalcore.cond,
    "linalg.det": metalcore.det,
    "linalg.eigh": metalcore.eigh,
    "linalg.eigvalsh": metalcore.eigvalsh,
    "linalg.inv": metalcore.inv,
    "linalg.lstsq": _lstsq,
    "linalg.lu": lambda A, pivot=True: metalcore.lu(A),
    "linalg.matrix_rank": metalcore.matrix_rank,
    "linalg.pinv": _pinv,
    "linalg.qr": metalcore.qr,
    "linalg.slogdet": metalcore.slogdet,
    "linalg.solve": metalcore.solve,
    "linalg.solve_ex": lambda A, B: metalcore.solve(A, B, check=False),
    "linalg.solve_triangular": _solve_triangular,
    "linalg.svd": _svd,
    "linalg.svdvals": metalcore.svdvals,
}
TESTED = [op for op in op_db if op.name in OURS]


@pytest.mark.parametrize("op", TESTED, ids=lambda op: f"{op.name} {op.variant_test_name}".strip())
def test_samples_of_torch(op: OpInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    name = op.name.removeprefix("linalg.")
    samples = of(op, torch.float64)
    truths = [results(op, op.op, sample) for sample in samples]
    torchs = getattr(torch.linalg, name)

    def ours(*args: Any, **options: Any) -> Any:
        with monkeypatch.context() as inside:
            inside.setattr(torch.linalg, name, torchs)
            return OURS[op.name](*args, **options)

    # torch's variants call the function by its name; the plain ones hold it
    monkeypatch.setattr(torch.linalg, name, ours)
    if not op.variant_test_name:
        monkeypatch.setattr(op, "op", ours)
    for sample, truth in zip(samples, truths, strict=True):
        found = results(op, op.op, sample)
        # two float64 algorithms for one problem differ by its condition
        allowed = tolerance(name, torch.float32, 5)
        for a, b in zip(found, truth, strict=True):
            assert error(a, b) <= allowed, sample
