# SPDX-License-Identifier: MIT
"""QR of one tall matrix, [m, n]."""

import torch
from torch import Tensor

import metalcore

from ..harness import Bench, nbytes


def _product(A: Tensor) -> Tensor:
    Q, R = metalcore.tsqr(A)
    return Q @ R


def _product_by_torch(A: Tensor) -> Tensor:
    Q, R = torch.linalg.qr(A)
    return Q @ R


BENCHES = (
    Bench(
        op="linalg/tsqr",
        plot_over="m",
        run=_product,
        peers={"torch": _product_by_torch},
        inputs=lambda m, n, dtype: (torch.randn(m, n, dtype=dtype),),
        sweep=tuple({"m": m, "n": n} for m, n in ((10_000, 8), (100_000, 16), (100_000, 64))),
        dtypes=(torch.float32, torch.float64),
        truth=lambda A: A,
        reduces_over=lambda A: A.shape[0],
        bytes_moved=lambda A: 2 * nbytes(A),
        flops=lambda A: 4 * A.numel() * A.shape[1],
    ),
)
