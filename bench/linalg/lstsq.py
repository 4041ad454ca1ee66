# SPDX-License-Identifier: MIT
"""Least squares with rank and singular values, [batch, m, n, k]."""

import torch
from torch import Tensor

import metalcore

from ..harness import Bench, nbytes

_POINTS = (
    *((200, 32, 32, 1), (200, 64, 16, 1), (100, 64, 64, 8)),
    *((1, 8, 4, 1), (1, 64, 32, 1), (1, 1024, 256, 1), (1, 1024, 256, 64)),
)


def _inputs(batch: int, m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    first = (batch,) if batch > 1 else ()
    A = torch.randn(*first, m, n, dtype=dtype) + 2 * m**0.5 * torch.eye(m, n, dtype=dtype)
    return A, torch.randn(*first, m, k, dtype=dtype)


def _torch(driver: str, A: Tensor, B: Tensor) -> Tensor:
    return torch.linalg.lstsq(A, B, driver=driver).solution


BENCHES = (
    Bench(
        op="linalg/lstsq",
        plot_over="n",
        run=lambda A, B: metalcore.lstsq(A, B).solution,
        # gelsd finds the rank and the singular values as well, gelsy the rank alone
        peers={
            "torch": lambda A, B: _torch("gelsy", A, B),
            "torch gelsd": lambda A, B: _torch("gelsd", A, B),
        },
        inputs=_inputs,
        sweep=tuple({"batch": b, "m": m, "n": n, "k": k} for b, m, n, k in _POINTS),
        dtypes=(torch.float32, torch.float64),
        truth=lambda A, B: _torch("gelsd", A, B),
        reduces_over=lambda A, B: 64 * max(A.shape[-2:]),
        bytes_moved=lambda A, B: nbytes(A, B, B),
    ),
)
