# SPDX-License-Identifier: MIT
"""Rank, [batch, m, n]."""

import torch
from torch import Tensor

import metalcore

from ..harness import Bench, nbytes

_POINTS = ((200, 32, 32), (100, 64, 64), (1, 8, 8), (1, 256, 256))


def _inputs(batch: int, m: int, n: int, dtype: torch.dtype) -> tuple[Tensor]:
    return (torch.randn((batch, m, n) if batch > 1 else (m, n), dtype=dtype),)


BENCHES = (
    Bench(
        op="linalg/matrix_rank",
        plot_over="n",
        run=lambda A: metalcore.matrix_rank(A).to(A.dtype),
        peers={"torch": lambda A: torch.linalg.matrix_rank(A).to(A.dtype)},
        inputs=_inputs,
        sweep=tuple({"batch": b, "m": m, "n": n} for b, m, n in _POINTS),
        dtypes=(torch.float32, torch.float64),
        truth=lambda A: torch.linalg.matrix_rank(A).to(A.dtype),
        reduces_over=lambda A: max(A.shape[-2:]),
        bytes_moved=lambda A: nbytes(A),
    ),
)
