# SPDX-License-Identifier: MIT
"""Sums of one row of n, and of rows, at two levels of precision."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from metalcore import precise

from ..harness import Bench, Built, Function, nbytes

_SWEEP = tuple(
    {"rows": rows, "n": n}
    for rows, n in ((1, 10**4), (1, 10**6), (1, 10**7), (1, 10**8), (4096, 1024))
)

_MOST_OF_FSUM = 10**6


def _inputs(rows: int, n: int, dtype: torch.dtype) -> tuple[Tensor]:
    return (torch.randn(rows, n, dtype=dtype),)


def _torch(x: Tensor) -> Tensor:
    return x.sum(-1)


def _fsum(x: Tensor) -> Callable[..., Tensor]:
    if x.numel() > _MOST_OF_FSUM:
        raise NotImplementedError("few values: each is an object of Python")
    return lambda x: torch.tensor([math.fsum(row) for row in x.tolist()], dtype=x.dtype)


def _xsum(x: Tensor) -> Callable[..., Tensor]:
    """Exact, by a superaccumulator of one thread, which takes doubles."""
    from xsum import xsum_large  # type: ignore[import-not-found, unused-ignore]

    # xsum reads no bfloat16
    kind = torch.float64 if x.dtype == torch.bfloat16 else x.dtype

    def row_sum(row: Tensor) -> float:
        accumulator = xsum_large()
        accumulator.add(row.to(kind).numpy())
        return float(accumulator.round())

    return lambda x: torch.tensor([row_sum(row) for row in x], dtype=x.dtype)


def _exact(x: Tensor) -> Tensor:
    return precise.sum(x, -1, level="exact")


def _compensated(x: Tensor) -> Tensor:
    return precise.sum(x, -1)


def _bench(run: Function, kind: str, peers: dict[str, Function | Built]) -> Bench:
    return Bench(
        op="precise/sum",
        run=run,
        peers=peers,
        inputs=_inputs,
        sweep=_SWEEP,
        dtypes=(torch.float32, torch.float64, torch.bfloat16),
        truth=_torch,
        reduces_over=lambda x: x.shape[-1],
        bytes_moved=lambda x: nbytes(x),
        kind=kind,
    )


BENCHES = (
    _bench(_exact, "exact", {"torch": _torch, "math.fsum": Built(_fsum), "xsum": Built(_xsum)}),
    _bench(_compensated, "compensated", {"torch": _torch}),
)
