# SPDX-License-Identifier: MIT
"""Products of matrices of pairs: `"double_float_matmul"`."""

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from metalcore._op import Op
from metalcore.ops.precise import double_float_matmul
from metalcore.ops.precise._pairs import joined, random_pair, split
from tests.backends import Backend
from tests.check import check_op, check_registration

SIZES = [
    ((3, 5), (5, 4)),
    ((2, 17, 33), (2, 33, 16)),
    ((1, 1), (1, 1)),
    ((3, 0), (0, 2)),
    ((0, 4), (4, 3)),
]


def _pairs(backend: Backend, *sizes: tuple[int, ...]) -> list[Any]:
    parts = [p for size in sizes for p in random_pair(*size, dtype=torch.float32)]
    return [p.to(backend.device) for p in parts]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_matches_reference(backend: Backend, sizes: tuple[tuple[int, ...], ...]) -> None:
    A, B = sizes
    C = (*A[:-1], B[-1])
    plain = (*_pairs(backend, A, B), None, None, None, None)
    for args in (plain, _pairs(backend, A, B, C, C)):
        check_op(backend, "double_float_matmul", args, reduces_over=A[-1], differentiable=False)


def test_error_of_products(backend: Backend) -> None:
    for K in (16, 600):
        parts = _pairs(backend, (8, K), (K, 8))
        A, B = joined(*parts[:2]).cpu(), joined(*parts[2:]).cpu()
        high, low = double_float_matmul.forward(*parts, None, None, None, None)
        off = (joined(high, low).cpu() - A @ B).abs() / (A.abs() @ B.abs())
        assert off.max() < 4e-14


def test_48_bits_are_left_where_all_cancels(backend: Backend) -> None:
    A, A_low, B, B_low = _pairs(backend, (4, 40), (40, 3))
    product = joined(A, A_low).cpu() @ joined(B, B_low).cpu()
    C, C_low = (p.to(backend.device) for p in split(product, torch.float32))
    D = (C * 0.37, C_low * 0)
    found = double_float_matmul.forward(A, A_low, B, B_low, C, C_low, *D)
    without = double_float_matmul.forward(
        A, A_low, B, B_low, C, C_low, torch.zeros_like(C), torch.zeros_like(C)
    )
    for (high, low), less in ((found, D), (without, None)):
        truth = _left(A, A_low, B, B_low, C, C_low, less)
        got = joined(high, low).cpu()
        for i, row in enumerate(truth):
            for j, value in enumerate(row):
                exact = float(value)
                assert abs(got[i, j].item() - exact) <= 2.0**-44 * abs(exact) + 1e-18


def _left(*parts: Any) -> list[list[Fraction]]:
    *pairs, less = parts
    A, B, C = (_sums(pairs[i], pairs[i + 1]) for i in (0, 2, 4))
    D = _fractions(less[0]) if less is not None else [[Fraction(0)] * len(C[0])] * len(C)
    return [
        [
            C[i][j] - D[i][j] - sum((a * B[k][j] for k, a in enumerate(A[i])), Fraction(0))
            for j in range(len(C[0]))
        ]
        for i in range(len(C))
    ]


def _sums(high: Tensor, low: Tensor) -> list[list[Fraction]]:
    rows = zip(_fractions(high), _fractions(low), strict=True)
    return [[a + b for a, b in zip(*row, strict=True)] for row in rows]


def _fractions(x: Tensor) -> list[list[Fraction]]:
    return [[Fraction(v) for v in row] for row in x.double().tolist()]


def test_registration() -> None:
    for sample in Op.all["double_float_matmul"].samples:
        check_registration("double_float_matmul", sample(torch.float32).args, differentiable=False)
