# SPDX-License-Identifier: MIT
"""Products of square matrices at each level, beside torch in the same type and in float64."""

import torch
from torch import Tensor

from metalcore import precise

from ..harness import Bench


def _inputs(n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(n, n, dtype=dtype), torch.randn(n, n, dtype=dtype)


def _exact(A: Tensor, B: Tensor) -> Tensor:
    return precise.matmul(A, B, level="exact")


def _float64(A: Tensor, B: Tensor) -> Tensor:
    return (A.double() @ B.double()).to(A.dtype)


BENCHES = tuple(
    Bench(
        op="precise/matmul",
        kind=kind,
        run=run,
        peers={"torch": torch.matmul, "float64": _float64},
        inputs=_inputs,
        sweep=tuple({"n": n} for n in (64, 256, 1024)),
        dtypes=(torch.float32, torch.float64),
        truth=torch.matmul,
        reduces_over=lambda A, B: A.shape[-1],
        flops=lambda A, B: 2 * A.shape[0] ** 3,
    )
    for kind, run in (("exact", _exact), ("compensated", precise.matmul))
)
