# SPDX-License-Identifier: MIT
"""An exact sum of batches of n, one after the other, beside a running sum in float64."""

import torch
from torch import Tensor

from metalcore.precise import Accumulator

from ..harness import Bench, nbytes


def _inputs(batches: int, n: int, dtype: torch.dtype) -> tuple[Tensor]:
    return (torch.randn(batches, n, dtype=dtype),)


def _run(x: Tensor) -> Tensor:
    total = Accumulator()
    for batch in x:
        total.add(batch)
    return total.sum(x.dtype)


def _torch(x: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for batch in x:
        total += batch.sum(dtype=torch.float64)
    return total.to(x.dtype)


_BENCH = Bench(
    op="precise/accumulator",
    run=_run,
    peers={"torch": _torch},
    inputs=_inputs,
    sweep=({"batches": 10, "n": 10**5},),
    dtypes=(torch.float32,),
    truth=_torch,
    reduces_over=lambda x: x.numel(),
    bytes_moved=lambda x: nbytes(x),
)
BENCHES = (_BENCH,)
