# SPDX-License-Identifier: MIT
"""Running sums: `"cumsum"` at each level, against exact fractions."""

import random

import pytest
import torch

import metalcore
from metalcore import precise
from tests.backends import FLOATS, Backend
from tests.check import check_op, check_registration
from tests.precise.exactly import KINDS, nearest, same_bits, total, values


@pytest.mark.parametrize("size", [(3, 33), (2, 2, 5), (1, 700), (7,), (0, 64), (3, 0)], ids=str)
def test_matches_reference(backend: Backend, size: tuple[int, ...]) -> None:
    for dtype in backend.dtypes:
        x = backend.randn(*size, dtype=dtype)
        for level in (0, 1, 2):
            check_op(backend, "precise_cumsum", (x, level), reduces_over=size[-1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_exact_sums_are_the_nearest_numbers(kind: str, dtype: torch.dtype) -> None:
    for seed in range(5):
        x = values(kind, seed, random.Random(seed).choice((1, 7, 40)), dtype)
        found = precise.cumsum(x, level="exact").double().tolist()
        assert found == [nearest(total(x[: i + 1]), dtype) for i in range(len(x))]


def test_the_device_does_not_change_a_bit() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.stack([values(kind, 2, 150, dtype) for kind in KINDS])
        found = precise.cumsum(x, level="exact")
        with metalcore.simulate():
            assert same_bits(precise.cumsum(x, level="exact"), found)


def test_the_last_one_is_the_sum(backend: Backend) -> None:
    x = backend.randn(4, 300)
    last = precise.cumsum(x, level="exact")[:, -1]
    assert same_bits(last.cpu(), precise.sum(x, -1, level="exact").cpu())


def test_any_dimension(backend: Backend) -> None:
    x = backend.randn(3, 4, 5)
    for dim in (0, 1, -1):
        found = precise.cumsum(x, dim, level="exact").cpu()
        torch.testing.assert_close(found, x.cpu().cumsum(dim))
    assert precise.cumsum(torch.tensor(3.0)).item() == 3.0


def test_derivatives_and_registration() -> None:
    for level in (0, 1):
        check_registration("precise_cumsum", (torch.randn(3, 5), level))
