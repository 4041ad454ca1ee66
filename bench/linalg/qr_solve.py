# SPDX-License-Identifier: MIT
"""Least squares by QR, A [batch, m, n] and B [batch, m, k]."""

import torch
from torch import Tensor

import metalcore

from ..harness import Bench, nbytes

_POINTS = (
    *((500, 16, 8, 1), (200, 64, 16, 1), (200, 64, 16, 16), (100, 32, 32, 4), (50, 96, 48, 2)),
    *((1, 16, 8, 1), (1, 1024, 256, 64), (8, 512, 128, 1)),
)


def _inputs(batch: int, m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    A = torch.randn(batch, m, n, dtype=dtype) + 3 * m**0.5 * torch.eye(m, n, dtype=dtype)
    return A, torch.randn(batch, m, k, dtype=dtype)


def _torch(A: Tensor, B: Tensor) -> Tensor:
    X: Tensor = torch.linalg.lstsq(A, B, driver="gels").solution
    return X


BENCHES = (
    Bench(
        op="linalg/qr_solve",
        plot_over="n",
        run=metalcore.qr_solve,
        peers={"torch": _torch},
        inputs=_inputs,
        sweep=tuple(dict(zip(("batch", "m", "n", "k"), p, strict=True)) for p in _POINTS),
        dtypes=(torch.float32, torch.float64),
        truth=_torch,
        reduces_over=lambda A, B: A.shape[-2],
        bytes_moved=lambda A, B: nbytes(A, B) + nbytes(B[..., : A.shape[-1], :]),
    ),
)
