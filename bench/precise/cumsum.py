# SPDX-License-Identifier: MIT
"""Running sums of rows of n at two levels of precision."""

import torch
from torch import Tensor

from metalcore import precise

from ..harness import Bench, nbytes

_SWEEP = tuple({"rows": rows, "n": n} for rows, n in ((1, 10**5), (1024, 1024)))


def _inputs(rows: int, n: int, dtype: torch.dtype) -> tuple[Tensor]:
    return (torch.randn(rows, n, dtype=dtype),)


def _torch(x: Tensor) -> Tensor:
    return x.cumsum(-1)


def _exact(x: Tensor) -> Tensor:
    return precise.cumsum(x, level="exact")


BENCHES = tuple(
    Bench(
        op="precise/cumsum",
        kind=kind,
        run=run,
        peers={"torch": _torch},
        inputs=_inputs,
        sweep=_SWEEP,
        dtypes=(torch.float32,),
        truth=_torch,
        reduces_over=lambda x: x.shape[-1],
        bytes_moved=lambda x: 2 * nbytes(x),
    )
    for kind, run in (("exact", _exact), ("compensated", precise.cumsum))
)
