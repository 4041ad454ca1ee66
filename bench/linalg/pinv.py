# SPDX-License-Identifier: MIT
"""Pseudo-inverse, [batch, m, n]."""

import torch
from torch import Tensor

import metalcore

from ..harness import Bench, nbytes

_POINTS = ((200, 32, 32), (200, 32, 16), (100, 64, 64), (1, 4, 4), (1, 64, 64), (1, 512, 256))


def _inputs(batch: int, m: int, n: int, dtype: torch.dtype) -> tuple[Tensor]:
    # of moderate condition
    size = (batch, m, n) if batch > 1 else (m, n)
    return (torch.randn(size, dtype=dtype) + 2 * m**0.5 * torch.eye(m, n, dtype=dtype),)


BENCHES = (
    Bench(
        op="linalg/pinv",
        plot_over="n",
        run=lambda A: metalcore.pinv(A),
        peers={"torch": torch.linalg.pinv},
        inputs=_inputs,
        sweep=tuple({"batch": b, "m": m, "n": n} for b, m, n in _POINTS),
        dtypes=(torch.float32, torch.float64),
        truth=torch.linalg.pinv,
        reduces_over=lambda A: 64 * max(A.shape[-2:]),
        bytes_moved=lambda A: nbytes(A, A),
    ),
)
