# SPDX-License-Identifier: MIT
"""Sums and means: `"sum"` at each level, against exact fractions."""

import math
import random
from fractions import Fraction

import pytest
import torch
from torch import Tensor

import metalcore
from metalcore import precise
from metalcore._op import Op
from tests.backends import FLOATS, Backend
from tests.check import check_op, check_registration
from tests.precise.exactly import KINDS, nearest, same_bits, total, values

CASES = [
    ((3, 33), "rows"),
    ((2, 2, 5), "three dimensions"),
    ((1, 9000), "a row of two slices"),
    ((7,), "one dimension"),
    ((1, 1), "one value"),
    ((0, 64), "no rows"),
]


@pytest.mark.parametrize("size", [c[0] for c in CASES], ids=[c[1] for c in CASES])
def test_matches_reference(backend: Backend, size: tuple[int, ...]) -> None:
    for dtype in backend.dtypes:
        x = backend.randn(*size, dtype=dtype)
        for level, mean in ((0, False), (1, True), (2, False)):
            check_op(backend, "precise_sum", (x, level, mean), reduces_over=size[-1])


def test_sums_of_nothing(backend: Backend) -> None:
    x = torch.zeros(3, 0, device=backend.device)
    for level in ("compensated", "exact", "float64"):
        assert torch.equal(precise.sum(x, -1, level=level).cpu(), torch.zeros(3))
        assert precise.mean(x, -1, level=level).isnan().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_exact_is_the_nearest_number(kind: str, dtype: torch.dtype) -> None:
    for seed in range(25):
        n = random.Random(seed).choice((1, 2, 3, 7, 16, 33, 100, 300))
        x = values(kind, seed, n, dtype)
        truth = total(x)
        assert precise.sum(x, level="exact").item() == nearest(truth, dtype)
        assert precise.mean(x, level="exact").item() == nearest(truth / n, dtype)


def test_long_exact_sums_of_every_number_of_parts() -> None:
    # by the widths of their exponents, blocks take one to four parts, or go term by term
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        for spread in (1, 15, 30, 60, 90, 130, 250):
            x = torch.randn(5000, generator=generator, dtype=torch.float64)
            x = x * 2.0 ** torch.randint(
                -spread // 2, spread // 2 + 1, (5000,), generator=generator
            )
            x = x.to(dtype)
            found = precise.sum(x, level="exact").item()
            assert found == nearest(total(x), dtype)
            if dtype == torch.float64:
                assert found == math.fsum(x.tolist())


def test_blocks_whose_bits_just_fit_a_double() -> None:
    # the sum of a block of 2048 floats has 11 bits more than they span; what it loses is left over
    large = 2 - 2**-23
    for bits in range(38, 48):
        small = (1 + 2**-23) * 2.0 ** (24 - bits)
        x = torch.tensor([large] * 2047 + [small] + [-large] * 2047 + [0.0])
        assert precise.sum(x, level="exact").item() == small


def test_ten_million_terms() -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(-(2**24), 2**24, (10**7,), generator=generator)
    for power, others in ((-149, 0), (-20, 0), (0, 10**6)):
        x = torch.ldexp(whole.float(), torch.tensor(power // 2))
        x = torch.ldexp(x, torch.tensor(power - power // 2))
        # what cancels, far above
        x[:others] = 1e30
        x[others : 2 * others] = -1e30
        truth = Fraction(int(whole[2 * others :].sum())) * Fraction(2) ** power
        assert precise.sum(x, level="exact").item() == nearest(truth, torch.float32)
        assert precise.mean(x, level="exact").item() == nearest(truth / 10**7, torch.float32)


def test_the_device_does_not_change_a_bit() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.stack([values(kind, seed, 40, dtype) for kind in KINDS for seed in range(2)])
        on_cpu = [f(x, -1, level="exact") for f in (precise.sum, precise.mean)]
        with metalcore.simulate():
            simulated = [f(x, -1, level="exact") for f in (precise.sum, precise.mean)]
        assert all(map(same_bits, on_cpu, simulated))


def test_order_threads_and_layout_do_not_change_a_bit() -> None:
    for dtype in FLOATS:
        x = values("cancelling", 3, 300_001, dtype)
        first = precise.sum(x, level="exact")
        generator = torch.Generator().manual_seed(0)
        for _ in range(5):
            shuffled = x[torch.randperm(len(x), generator=generator)]
            assert same_bits(precise.sum(shuffled, level="exact"), first)
        grid = x[:300_000].view(600, 500)
        assert same_bits(
            precise.sum(grid, level="exact"), precise.sum(grid.T.contiguous(), level="exact")
        )
    before = torch.get_num_threads()
    for level in ("exact", "compensated"):
        for dtype in FLOATS:
            x = torch.randn(400_000).to(dtype)
            found = []
            for threads in (1, 2, 4):
                torch.set_num_threads(threads)
                found.append(precise.sum(x, level=level))
            torch.set_num_threads(before)
            assert same_bits(found[0], found[1])
            assert same_bits(found[0], found[2])


SPECIAL = [
    ([math.inf, 1.0], math.inf),
    ([-math.inf, 1.0], -math.inf),
    ([math.inf, -math.inf], math.nan),
    ([math.nan, 1.0], math.nan),
    ([-0.0, -0.0], -0.0),
    ([-0.0, 0.0], 0.0),
    ([1.0, -1.0], 0.0),
    ([1e-45, 1e-45], 2.802596928649634e-45),
    ([3e38, 3e38, -3e38], float(torch.tensor(3e38))),
    ([3e38, 3e38], math.inf),
]


@pytest.mark.parametrize(("terms", "result"), SPECIAL, ids=str)
def test_special_values(backend: Backend, terms: list[float], result: float) -> None:
    x = torch.tensor(terms, device=backend.device)
    found = precise.sum(x, level="exact").cpu()
    assert same_bits(found, torch.tensor(result)), found


def test_compensated_keeps_what_float32_loses(backend: Backend) -> None:
    x = torch.tensor([1e6, 1e-2, 1e-2, -1e6], device=backend.device)
    assert precise.sum(x).item() == pytest.approx(2e-2, rel=1e-5)
    assert (((x[0] + x[1]) + x[2]) + x[3]).item() != pytest.approx(2e-2, rel=1e-1)


def test_compensated_float64_has_twice_the_digits() -> None:
    x = torch.tensor([1e16, 1.0, 1.0, -1e16], dtype=torch.float64)
    assert precise.sum(x).item() == 2.0


def test_dimensions_as_torch(backend: Backend) -> None:
    x = backend.randn(3, 4, 5)
    for dim in (None, 0, 1, -1, (0, 2), (1, -1)):
        for keepdim in (False, True):
            found = precise.sum(x, dim, keepdim, level="exact").cpu()
            truth = x.cpu().double().sum(dim, keepdim)
            assert same_bits(found, truth.float())
    assert precise.mean(torch.tensor(3.0)).item() == 3.0


def test_derivatives_and_registration() -> None:
    x = torch.randn(3, 5)
    for level in (0, 1, 2):
        check_registration("precise_sum", (x, level, False))
    check_registration("precise_sum", (x, 1, True))


def test_compiles_without_graph_breaks() -> None:
    def loss(x: Tensor) -> Tensor:
        return precise.mean(precise.sum(x.square(), -1, level="exact"))

    x = torch.randn(4, 33, requires_grad=True)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(x), loss(x))
    (dx,) = torch.autograd.grad(compiled(x), x)
    torch.testing.assert_close(dx, x.detach() / 2)


def test_every_level_has_an_example() -> None:
    assert {sample(torch.float32).args[1] for sample in Op.all["precise_sum"].samples} == {0, 1}


BAD = [
    (
        lambda: precise.sum(torch.ones(2), level="exactly"),
        ValueError,
        "sum: level must be known; got exactly; did you mean exact?",
    ),
    (
        lambda: precise.mean(torch.ones(2), 3),
        ValueError,
        "mean: dim must be a dimension of x, got 3 for x [2]",
    ),
    (
        lambda: precise.sum(torch.ones(2, 3), (0, -2)),
        ValueError,
        "sum: dim must not repeat; got [0, 0] for x [2, 3]",
    ),
    (
        lambda: precise.sum(torch.ones(2).long()),
        TypeError,
        "sum: x must be float32, float64, float16 or bfloat16, got int64; "
        "convert it with x.float()",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[b[2][:50] for b in BAD])
def test_bad_input_is_named(call, kind, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message
