# SPDX-License-Identifier: MIT
"""Functions of n DoubleFloats, beside torch's in float64."""

from collections.abc import Callable

import torch
from torch import Tensor

from metalcore.precise import DoubleFloat

from ..harness import Bench

_FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "div": torch.div,
    "exp": lambda x, y: x.exp(),
    "log": lambda x, y: x.log(),
}


def _inputs(n: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    x, y = (DoubleFloat(torch.rand(n, dtype=torch.float64) + 0.5) for _ in range(2))
    return x.high, x.low, y.high, y.low


def _bench(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> Bench:
    def run(x: Tensor, x_low: Tensor, y: Tensor, y_low: Tensor) -> Tensor:
        found = function(DoubleFloat(x, x_low), DoubleFloat(y, y_low))
        return found.to(torch.float32)

    def float64(x: Tensor, x_low: Tensor, y: Tensor, y_low: Tensor) -> Tensor:
        found = function(x.double() + x_low.double(), y.double() + y_low.double())
        return found.to(x.dtype)

    return Bench(
        op="precise/double_float",
        kind=name,
        run=run,
        peers={"torch": float64},
        inputs=_inputs,
        sweep=({"n": 10**4}, {"n": 10**6}),
        dtypes=(torch.float32,),
        truth=float64,
        reduces_over=lambda *_: 1,
    )


BENCHES = tuple(_bench(name, function) for name, function in _FUNCTIONS.items())
