# SPDX-License-Identifier: MIT
"""Determinants and their logarithms, [batch, n, n]."""

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


BENCHES = tuple(
    Bench(
        op="linalg/det",
        plot_over="n",
        kind=kind,
        run=ours,
        peers={"torch": torchs},
        inputs=_inputs,
        sweep=tuple({"batch": b, "n": n} for b, n in _POINTS),
        dtypes=(torch.float32, torch.float64),
        truth=torchs,
        reduces_over=lambda A: A.shape[-1] ** 2,
        bytes_moved=lambda A: nbytes(A),
    )
    for kind, ours, torchs in (
        ("", metalcore.det, torch.linalg.det),
        ("slogdet", metalcore.slogdet, torch.linalg.slogdet),
    )
)
