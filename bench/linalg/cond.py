# SPDX-License-Identifier: MIT
"""Condition number in the 2-norm and the Frobenius norm, [batch, n, n]."""

import torch
from torch import Tensor

import metalcore

from ..harness import Bench, nbytes

_POINTS = ((200, 32), (100, 64), (1, 8), (1, 256))


def _inputs(batch: int, n: int, dtype: torch.dtype) -> tuple[Tensor]:
    size = (batch, n, n) if batch > 1 else (n, n)
    return (torch.randn(size, dtype=dtype) + 2 * n**0.5 * torch.eye(n, dtype=dtype),)


BENCHES = tuple(
    Bench(
        op="linalg/cond",
        plot_over="n",
        kind="" if p is None else str(p),
        run=lambda A, p=p: metalcore.cond(A, p),
        peers={"torch": lambda A, p=p: torch.linalg.cond(A, p)},
        inputs=_inputs,
        sweep=tuple({"batch": b, "n": n} for b, n in _POINTS),
        dtypes=(torch.float32, torch.float64),
        truth=lambda A, p=p: torch.linalg.cond(A, p),
        reduces_over=lambda A: 64 * A.shape[-1],
        bytes_moved=lambda A: nbytes(A),
    )
    for p in (None, "fro")
)
