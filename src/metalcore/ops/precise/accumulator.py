# SPDX-License-Identifier: MIT
"""Accumulator: an exact sum that is kept, merged and rounded when it is asked for.

It is a whole number in limbs of 32 bits, limb i of which counts 2^(32 i - 2176), in the columns of
an int64 tensor; the last columns tell whether there was a NaN, an infinity, its negative, or a term
other than -0, and how many terms there were. So merging is adding integers, in any order.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from metalcore._check import dtype_name, expect, expect_float, expect_shape, refuse, shape
from metalcore._op import Example, Op
from metalcore._sharding import is_dtensor
from metalcore.ops.precise._levels import as_rows

_LIMBS, _LOWEST, _WIDTH = 134, -2176, 139
# Limbs have 31 bits to spare.
_MOST_MERGES = 2**30

_forward = Op("precise_limbs(Tensor x) -> Tensor", batched=True, sharding="*n -> *L")


class Accumulator:
    """The exact sum of all that is added to it, over time, processes and devices.

    Args:
        shape: of the sums; each `add` reduces its tensor to it.

    Example:
        >>> total = metalcore.precise.Accumulator()
        >>> for part in torch.randn(1000).split(64):
        ...     total.add(part)
        >>> total.sum(), total.mean(), total.count
    """

    def __init__(self, shape: Sequence[int] = ()) -> None:
        self._state = torch.zeros(*shape, _WIDTH, dtype=torch.int64)
        self._merges = 0

    def add(self, x: Tensor, dim: int | Sequence[int] | None = None) -> "Accumulator":
        """Add the sum of `x` over `dim`, over all dimensions where none is given. Of a DTensor the
        sum is over all processes, in each of them."""
        expect_float("Accumulator.add", x=x)
        rows, _ = as_rows("Accumulator.add", x.detach(), dim)
        limbs: Any = _forward(rows)
        if is_dtensor(limbs):
            # a sum over processes of limbs is exact too
            return self._merge("add", limbs.full_tensor().cpu(), limbs.device_mesh.size() - 1)
        return self._merge("add", limbs.cpu())

    def merge(self, other: "Accumulator") -> "Accumulator":
        """Add what another one has added up."""
        return self._merge("merge", other._state, other._merges)

    def _merge(self, op: str, state: Tensor, merges: int = 0) -> "Accumulator":
        if state.shape != self._state.shape:
            sizes = f"{list(self._state.shape[:-1])}, got {shape(state[..., 0])}"
            refuse(f"Accumulator.{op}", f"sums must have the shape of the accumulator, {sizes}")
        self._merges += merges + 1
        self._state = self._state + state
        if self._merges >= _MOST_MERGES:
            self._carry()
        return self

    def _carry(self) -> None:
        self._state, self._merges = _carried(self._state), 0

    def all_reduce(self, group: Any = None) -> "Accumulator":
        """Add up the sums of all processes of a group of `torch.distributed`, in each of them."""
        self._carry()
        torch.distributed.all_reduce(self._state, group=group)
        self._merges = torch.distributed.get_world_size(group)
        return self

    @property
    def count(self) -> int:
        """How many terms each sum has."""
        counts = self._state[..., -1].flatten()
        return int(counts[0]) if counts.numel() else 0

    def sum(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The nearest numbers of `dtype` to the sums."""
        return self._rounded(1, dtype)

    def mean(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The nearest numbers of `dtype` to the means; NaN of no terms."""
        if self.count == 0:
            return torch.full(self._state.shape[:-1], math.nan, dtype=dtype)
        return self._rounded(self.count, dtype)

    def _rounded(self, divisor: int, dtype: torch.dtype) -> Tensor:
        rows = self._state.reshape(-1, _WIDTH).tolist()
        values = [_nearest(row, divisor, dtype) for row in rows]
        sums = torch.tensor(values, dtype=torch.float64).to(dtype)
        return sums.reshape(self._state.shape[:-1])

    def state_dict(self) -> dict[str, Tensor]:
        """The sums as integers, for `torch.save`; equal sums are equal integers."""
        self._carry()
        return {"limbs": self._state.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take the place and the shape of what `state_dict` was of."""
        op, limbs = "Accumulator.load_state_dict", state["limbs"]
        is_integer = limbs.dtype == torch.int64
        expect(is_integer, op, f"limbs must be int64, got {dtype_name(limbs.dtype)}")
        expect_shape(op, "limbs", limbs, (*limbs.shape[:-1], _WIDTH))
        self._state, self._merges = limbs.clone(), 0


def _nearest(row: list[int], divisor: int, dtype: torch.dtype) -> float:
    """A row of limbs over `divisor`, to the nearest number of `dtype`, ties to even."""
    has_nan, has_above, has_below, is_plain = row[_LIMBS : _LIMBS + 4]
    if has_nan or has_above or has_below:
        is_nan = has_nan or (has_above and has_below)
        return math.nan if is_nan else math.inf if has_above else -math.inf
    total = sum(limb << 32 * i for i, limb in enumerate(row[:_LIMBS]))
    if total == 0:
        return 0.0 if is_plain or not row[-1] else -0.0
    info = torch.finfo(dtype)
    digits = 1 - round(math.log2(info.eps))
    least = round(math.log2(info.smallest_normal)) - digits + 1
    over, under = abs(total), divisor << -_LOWEST
    exponent = over.bit_length() - under.bit_length()
    # the first bit is there, or one below
    exponent -= (over << max(0, -exponent)) < (under << max(0, exponent))
    unit = max(exponent - digits + 1, least)
    over, under = over << max(0, -unit), under << max(0, unit)
    kept, rest = divmod(over, under)
    kept += 2 * rest > under or (2 * rest == under and kept % 2 == 1)
    sign = 1.0 if total > 0 else -1.0
    is_too_large = kept.bit_length() + unit > 1024
    return sign * (math.inf if is_too_large else math.ldexp(kept, unit))


def _carried(state: Tensor) -> Tensor:
    """The same sums with limbs from 0 to 2^32 - 1, but for the last one, which has the sign;
    flags of 0 or 1."""
    limbs, up = list(state.unbind(-1)), torch.zeros_like(state[..., 0])
    for i in range(_LIMBS - 1):
        whole = limbs[i] + up
        limbs[i], up = whole & 0xFFFFFFFF, whole >> 32
    limbs[_LIMBS - 1] = limbs[_LIMBS - 1] + up
    for i in range(_LIMBS, _WIDTH - 1):
        limbs[i] = (limbs[i] != 0).long()
    return torch.stack(limbs, -1)


@_forward.reference
def _(x: Tensor) -> Tensor:
    wide = x.double()
    is_finite = wide.isfinite()
    fraction, exponent = torch.frexp(torch.where(is_finite, wide, 0))
    mantissa = (fraction.abs() * 2.0**53).long()
    sign = torch.where(fraction < 0, -1, 1)
    place = exponent.long() - 53 - _LOWEST
    limb, shift = place >> 5, place & 31
    low, high = (mantissa & 0xFFFFFFFF) << shift, (mantissa >> 32) << shift
    found = wide.new_zeros((*x.shape[:-1], _WIDTH), dtype=torch.int64)
    for step, part in ((0, low), (1, high)):
        found = found.scatter_add(-1, limb + step, sign * (part & 0xFFFFFFFF))
        found = found.scatter_add(-1, limb + step + 1, sign * (part >> 32))
    is_negative_zero = (wide == 0) & wide.signbit()
    flags = (wide.isnan(), wide == torch.inf, wide == -torch.inf, ~is_negative_zero)
    counts = [flag.any(-1).long() for flag in flags]
    counts.append(torch.full_like(counts[0], x.shape[-1]))
    return torch.cat((found[..., :_LIMBS], torch.stack(counts, -1)), -1)


@_forward.determines
def _(limbs: Tensor) -> tuple[Tensor, ...]:
    return (_carried(limbs),)


@_forward.example
def _(dtype: torch.dtype) -> Example:
    return Example((torch.randn(5, 1000).to(dtype),), reduces_over=1000)
