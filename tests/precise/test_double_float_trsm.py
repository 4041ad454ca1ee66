# SPDX-License-Identifier: MIT
"""Triangular systems of pairs: `"double_float_trsm"`."""

import pytest
import torch

import metalcore
from metalcore._op import Op
from metalcore.ops.precise._pairs import random_pair
from metalcore.precise import DoubleFloat
from tests.backends import Backend
from tests.check import check_op, check_registration


def _args(backend: Backend, n: int, k: int, lower: bool, *batch: int) -> tuple[object, ...]:
    A, A_low = random_pair(*batch, n, n, dtype=torch.float32)
    A = A / max(1, n) + 2 * torch.eye(n)
    parts = (A, A_low, *random_pair(*batch, n, k, dtype=torch.float32))
    return (*(p.to(backend.device) for p in parts), lower)


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("size", [(1, 1), (9, 4, 2), (33, 70), (5, 0), (4, 3, 0)], ids=str)
def test_matches_reference(backend: Backend, size: tuple[int, ...], lower: bool) -> None:
    n, k, *batch = size
    args = _args(backend, n, k, lower, *batch)
    check_op(backend, "double_float_trsm", args, reduces_over=n, differentiable=False)


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("unit", [True, False])
def test_trsm_takes_double_floats(backend: Backend, transpose: bool, unit: bool) -> None:
    A = torch.randn(2, 7, 7, dtype=torch.float64) / 7 + 2 * torch.eye(7)
    b = torch.randn(2, 7, dtype=torch.float64)
    X, Y = (DoubleFloat(v).to(backend.device) for v in (A, b))
    found = metalcore.trsm(X, Y, transpose=transpose, unit_diagonal=unit)
    truth = metalcore.trsm(A, b, transpose=transpose, unit_diagonal=unit)
    torch.testing.assert_close(found.cpu().to(torch.float64), truth, rtol=1e-13, atol=1e-13)


def test_registration() -> None:
    for sample in Op.all["double_float_trsm"].samples:
        check_registration("double_float_trsm", sample(torch.float32).args, differentiable=False)
