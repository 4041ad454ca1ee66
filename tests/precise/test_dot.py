# SPDX-License-Identifier: MIT
"""Dot products and norms: `"dot"` at each level, against exact fractions."""

import math
import random

import pytest
import torch

import metalcore
from metalcore import precise
from tests.backends import FLOATS, Backend
from tests.check import check_op, check_registration
from tests.precise.exactly import KINDS, nearest, same_bits, total_of_products, values


@pytest.mark.parametrize("size", [(3, 33), (2, 2, 5), (1, 9000), (7,), (0, 64)], ids=str)
def test_matches_reference(backend: Backend, size: tuple[int, ...]) -> None:
    for dtype in backend.dtypes:
        x, y = backend.randn(*size, dtype=dtype), backend.randn(*size, dtype=dtype).abs()
        for level in (0, 1, 2):
            check_op(backend, "precise_dot", (x, y, level, False), reduces_over=size[-1])
        shifted = x + x.sign()
        check_op(backend, "precise_dot", (x, shifted, 1, True), reduces_over=size[-1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_exact_is_the_nearest_number(kind: str, dtype: torch.dtype) -> None:
    for seed in range(25):
        r = random.Random(seed)
        n = r.choice((1, 2, 3, 7, 16, 33, 100))
        x, y = values(kind, seed, n, dtype), values(r.choice(list(KINDS)), seed + 1, n, dtype)
        truth = nearest(total_of_products(x, y), dtype)
        assert precise.dot(x, y, level="exact").item() == truth
        size = nearest(total_of_products(x, x), dtype, root=True)
        assert precise.norm(x, level="exact").item() == size


def test_long_exact_products_of_every_number_of_parts() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        for spread in (1, 15, 40, 80, 200):
            x, y = torch.randn(2, 4500, generator=generator, dtype=torch.float64)
            x = x * 2.0 ** torch.randint(
                -spread // 2, spread // 2 + 1, (4500,), generator=generator
            )
            x, y = x.to(dtype), y.to(dtype)
            truth = nearest(total_of_products(x, y), dtype)
            assert precise.dot(x, y, level="exact").item() == truth


def test_the_device_does_not_change_a_bit() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        kinds = [*KINDS]
        x = torch.stack([values(kind, 5, 40, dtype) for kind in kinds])
        y = torch.stack([values(kind, 6, 40, dtype) for kind in reversed(kinds)])
        found = precise.dot(x, y, level="exact"), precise.norm(x, -1, level="exact")
        with metalcore.simulate():
            simulated = precise.dot(x, y, level="exact"), precise.norm(x, -1, level="exact")
        assert all(map(same_bits, found, simulated))


def test_threads_do_not_change_a_bit() -> None:
    before = torch.get_num_threads()
    for level in ("exact", "compensated"):
        for dtype in FLOATS:
            x, y = torch.randn(2, 300_000).to(dtype)
            found = []
            for threads in (1, 2, 4):
                torch.set_num_threads(threads)
                found.append(precise.dot(x, y, level=level))
            torch.set_num_threads(before)
            assert same_bits(found[0], found[1])
            assert same_bits(found[0], found[2])


SPECIAL = [
    ([math.inf, 1.0], [0.0, 1.0], math.nan),
    ([math.inf, 1.0], [-1.0, 1.0], -math.inf),
    ([math.nan, 1.0], [1.0, 1.0], math.nan),
    ([1e30, 1e30], [1e30, -1e30], 0.0),
    ([1e-30], [1e-30], 0.0),
    ([1e30], [1e30], math.inf),
]


@pytest.mark.parametrize(("x", "y", "result"), SPECIAL, ids=str)
def test_special_values(backend: Backend, x: list[float], y: list[float], result: float) -> None:
    a, b = (torch.tensor(v, device=backend.device) for v in (x, y))
    assert same_bits(precise.dot(a, b, level="exact").cpu(), torch.tensor(result))


def test_the_root_of_a_negative_sum_is_nan(backend: Backend) -> None:
    x = torch.tensor([[1.0, 2.0], [math.inf, 1.0]], device=backend.device)
    for level in (0, 1):
        assert torch.ops.metalcore.precise_dot(x, -x, level, True).isnan().all()


def test_a_norm_overflows_only_if_it_must(backend: Backend) -> None:
    x = torch.tensor([3e30, 4e30], device=backend.device)
    assert precise.norm(x, level="exact").item() == pytest.approx(5e30, rel=1e-7)


def test_compensated_float64_products_have_twice_the_digits() -> None:
    x = torch.tensor([1 + 2.0**-30, 1.0], dtype=torch.float64)
    y = torch.tensor([1 - 2.0**-30, -1.0], dtype=torch.float64)
    assert precise.dot(x, y).item() == -(2.0**-60)


def test_the_gradient_of_a_norm(backend: Backend) -> None:
    x = backend.randn(3, 8).requires_grad_()
    (dx,) = torch.autograd.grad(precise.norm(x, -1).sum(), x)
    torch.testing.assert_close(dx, (x / x.norm(dim=-1, keepdim=True)).detach())
    zero = torch.zeros(4, device=backend.device, requires_grad=True)
    (dzero,) = torch.autograd.grad(precise.norm(zero), zero)
    assert not dzero.any()


def test_shapes_broadcast() -> None:
    x, y = torch.randn(3, 1, 5), torch.randn(4, 5)
    found = precise.dot(x, y, level="exact")
    torch.testing.assert_close(found, (x * y).sum(-1))


def test_derivatives_and_registration() -> None:
    x = torch.randn(3, 5)
    check_registration("precise_dot", (x, x + 1, 0, False))
    check_registration("precise_dot", (x, x + x.sign(), 1, True))
