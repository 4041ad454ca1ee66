# SPDX-License-Identifier: MIT
"""Dot products of two rows of n at two levels of precision."""

import torch
from torch import Tensor

from metalcore import precise

from ..harness import Bench, nbytes

_SWEEP = tuple({"rows": rows, "n": n} for rows, n in ((1, 10**4), (1, 10**6), (1, 10**7)))


def _inputs(rows: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, n, dtype=dtype), torch.rand(rows, n, dtype=dtype)


def _torch(x: Tensor, y: Tensor) -> Tensor:
    return torch.linalg.vecdot(x, y)


def _exact(x: Tensor, y: Tensor) -> Tensor:
    return precise.dot(x, y, level="exact")


BENCHES = tuple(
    Bench(
        op="precise/dot",
        kind=kind,
        run=run,
        peers={"torch": _torch},
        inputs=_inputs,
        sweep=_SWEEP,
        dtypes=(torch.float32, torch.float64),
        truth=_torch,
        reduces_over=lambda x, y: x.shape[-1],
        bytes_moved=lambda x, y: nbytes(x) + nbytes(y),
    )
    for kind, run in (("exact", _exact), ("compensated", precise.dot))
)
