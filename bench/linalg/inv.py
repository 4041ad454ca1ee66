# SPDX-License-Identifier: MIT
"""Inverses, [batch, n, n]."""

import torch
from torch import Tensor

import metalcore

from ..harness import Bench, nbytes

_POINTS = (
    *((200, 32), (500, 16), (100, 64), (1000, 4)),
    *((1, n) for n in (1, 2, 4, 8, 16, 32, 64, 128, 512, 1024)),
)


def _inputs(batch: int, n: int, dtype: torch.dtype) -> tuple[Tensor]:
    A = torch.randn(batch, n, n, dtype=dtype) / (2 + 2 * n**0.5) + torch.eye(n, dtype=dtype)
    return (A.roll(n // 2, -2),)


BENCHES = (
    Bench(
        op="linalg/inv",
        plot_over="n",
        run=metalcore.inv,
        peers={"torch": torch.linalg.inv},
        inputs=_inputs,
        sweep=tuple({"batch": b, "n": n} for b, n in _POINTS),
        dtypes=(torch.float32, torch.float64),
        truth=torch.linalg.inv,
        reduces_over=lambda A: A.shape[-1],
        bytes_moved=lambda A: 2 * nbytes(A),
        flops=lambda A: 2 * A.numel() * A.shape[-1],
    ),
)
