# SPDX-License-Identifier: MIT
"""Singular values that are equal, or nearly so: orthogonal matrices, and those close to them."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import metalcore
from metalcore import _native
from metalcore._accuracy import error, tolerance
from tests.linalg.inputs import MATRICES

DTYPES = [torch.float32, torch.float64]
EACH = 16
"""Matrices of each size and kind: all lanes of a group."""


def orthogonal(n: int) -> Tensor:
    return torch.linalg.qr(torch.randn(EACH, n, n, dtype=torch.float64))[0]


def _clustered(n: int, spread: float) -> Tensor:
    values = 1 + spread * torch.randn(EACH, 1, n, dtype=torch.float64)
    return orthogonal(n) * values @ orthogonal(n)


KINDS: dict[str, Callable[[int], Tensor]] = {
    "orthogonal": orthogonal,
    "scaled": lambda n: orthogonal(n) * torch.randn(EACH, 1, 1, dtype=torch.float64).exp(),
    "within 1e-7": lambda n: _clustered(n, 1e-7),
    "within 1e-12": lambda n: _clustered(n, 1e-12),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_values_of_every_size(kind: str, dtype: torch.dtype) -> None:
    with metalcore.trace() as t:
        for n in range(1, 65):
            A = KINDS[kind](n).to(dtype)
            S = metalcore.svdvals(A)
            assert error(S, torch.linalg.svdvals(A.double())) <= tolerance("svd", dtype, 16 * n)
    assert {record.variant for record in t.records} == {"interleaved"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_depends_on_them(dtype: torch.dtype) -> None:
    for n in range(2, 65, 3):
        A = orthogonal(n).to(dtype)
        B = torch.randn(EACH, n, 2, dtype=dtype)
        X = metalcore.lstsq(A, B).solution
        assert error(X, A.double().mT @ B.double()) <= tolerance("lstsq", dtype, 16 * n)
        assert (metalcore.matrix_rank(A) == n).all()
        assert (metalcore.cond(A) - 1).abs().max() <= tolerance("svd", dtype, 16 * n)


@pytest.fixture
def _no_sweeps() -> Iterator[None]:
    usual = _native.knobs()["svd"]["sweeps_per_value"]
    _native.set_knob("svd", "sweeps_per_value", 0)
    yield
    _native.set_knob("svd", "sweeps_per_value", usual)


@pytest.mark.usefixtures("_no_sweeps")
@pytest.mark.parametrize("name", MATRICES)
def test_bisection_alone(name: str) -> None:
    for m, n in ((1, 1), (2, 2), (19, 8), (33, 40)):
        A = torch.stack([MATRICES[name](m, n) for _ in range(5)])
        for dtype in DTYPES:
            S = metalcore.svdvals(A.to(dtype))
            assert error(S, torch.linalg.svdvals(A.to(dtype).double())) <= tolerance(
                "svd", dtype, m * n
            )
