# SPDX-License-Identifier: MIT
"""Numbers that are hard to add up, and what their sums round to, by exact fractions."""

import math
import random
from collections.abc import Callable, Iterable
from fractions import Fraction

import torch
from torch import Tensor

# bits of the fraction, exponent of the least number above zero, exponent of what is too large
FORMATS = {
    torch.float64: (53, -1074, 1024),
    torch.float32: (24, -149, 128),
    torch.float16: (11, -24, 16),
    torch.bfloat16: (8, -133, 128),
}


def nearest(value: Fraction, dtype: torch.dtype, *, root: bool = False) -> float:
    """The number of `dtype` nearest to `value`, or to its square root; ties to even."""
    if value == 0:
        return 0.0
    digits, least, limit = FORMATS[dtype]
    size = abs(value)
    exponent = _floor_log2(size)
    if root:
        exponent //= 2
    unit = Fraction(2) ** max(exponent - digits + 1, least)
    if root:
        scaled = size / unit**2
        kept = math.isqrt(scaled.numerator // scaled.denominator)
        over = (2 * kept + 1) ** 2
        is_up = 4 * scaled > over or (4 * scaled == over and kept % 2 == 1)
    else:
        kept = size.numerator * unit.denominator // (size.denominator * unit.numerator)
        rest = size / unit - kept
        is_up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and kept % 2 == 1)
    result = (kept + is_up) * unit
    sign = -1.0 if value < 0 else 1.0
    return sign * math.inf if result >= Fraction(2) ** limit else sign * float(result)


def _floor_log2(value: Fraction) -> int:
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if value >= Fraction(2) ** guess else guess - 1


def fractions(x: Tensor) -> list[Fraction]:
    return [Fraction(v) for v in x.double().flatten().tolist()]


def total(x: Tensor) -> Fraction:
    return _sum(fractions(x))


def total_of_products(x: Tensor, y: Tensor) -> Fraction:
    return _sum(a * b for a, b in zip(fractions(x), fractions(y), strict=True))


def _sum(values: Iterable[Fraction]) -> Fraction:
    total = Fraction(0)
    for v in values:
        total += v
    return total


Kind = Callable[[random.Random, int], list[float]]


def _any_exponent(r: random.Random, n: int) -> list[float]:
    return [r.choice((-1, 1)) * math.ldexp(1 + r.random(), r.randint(-148, 126)) for _ in range(n)]


def _all_ones(r: random.Random, n: int) -> list[float]:
    """Mantissas of ones alone, most of them negative."""
    return [r.choice((1, -1, -1)) * math.ldexp(2**24 - 1, r.randint(-40, 10)) for _ in range(n)]


def _cancelling(r: random.Random, n: int) -> list[float]:
    """Pairs that leave little, if anything, far below them."""
    half = [math.ldexp(r.uniform(-1, 1), r.randint(60, 120)) for _ in range(n // 2)]
    rest = [math.ldexp(r.uniform(-1, 1), -80) for _ in range(n - 2 * len(half))]
    mixed = [*half, *(-v for v in half), *rest]
    r.shuffle(mixed)
    return mixed


def _subnormal(r: random.Random, n: int) -> list[float]:
    return [math.ldexp(r.randint(-(2**24), 2**24), -149) for _ in range(n)]


def _ties(r: random.Random, n: int) -> list[float]:
    """Sums that lie half way between two numbers, or next to it."""
    unit = math.ldexp(1, r.randint(-20, 20))
    values = [unit * (2**24 + r.randint(0, 3)), unit / 2 * r.choice((1, -1))]
    values += [r.choice((0.0, 1e-30 * unit, -1e-30 * unit)) for _ in range(max(0, n - 2))]
    return values[:n]


def _large(r: random.Random, n: int) -> list[float]:
    """Partial sums overflow, the whole may not."""
    return [r.choice((-1, 1)) * math.ldexp(2**24 - r.randint(1, 3), 104) for _ in range(n)]


KINDS: dict[str, Kind] = {
    "normal": lambda r, n: [r.gauss(0, 1) for _ in range(n)],
    "any exponent": _any_exponent,
    "all ones": _all_ones,
    "cancelling": _cancelling,
    "subnormal": _subnormal,
    "ties": _ties,
    "large": _large,
    "zeros": lambda r, n: [r.choice((0.0, -0.0, -0.0)) for _ in range(n)],
}


def values(kind: str, seed: int, n: int, dtype: torch.dtype) -> Tensor:
    """`n` numbers of a kind; half precision has them brought into its range."""
    found = torch.tensor(KINDS[kind](random.Random(seed), n), dtype=torch.float64)
    if dtype == torch.float64 and seed % 2:
        # with the digits and the range that only float64 has
        generator = torch.Generator().manual_seed(seed)
        found = found * (1 + torch.rand(n, generator=generator, dtype=torch.float64))
        found = found.sign() * found.abs() ** (7 if seed % 4 == 1 else 1)
    found = found.float() if dtype != torch.float64 else found
    if dtype == torch.float16:
        found = found.clamp(-60000, 60000)
    found = found.to(dtype)
    return torch.where(found.isfinite(), found, torch.ones_like(found))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two results are bitwise equal, signs of zeros too; any NaN is like any other."""
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[a.element_size()]
    equal = (a.view(integers) == b.view(integers)) | (a.isnan() & b.isnan())
    return a.dtype == b.dtype and a.shape == b.shape and bool(equal.all())
