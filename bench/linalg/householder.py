# SPDX-License-Identifier: MIT
"""Householder reflectors: one per matrix [batch, n, n], found from its first column and applied."""

import torch
from torch import Tensor

import metalcore

from ..harness import Bench, nbytes


def _run(A: Tensor) -> Tensor:
    return metalcore.apply_householder(A, *metalcore.householder_vector(A[..., 0]))


def _torch(A: Tensor) -> Tensor:
    """LAPACK's reflector, found by geqrf of the column and applied by two products."""
    column, tau = torch.geqrf(A[..., :1].contiguous())
    v = column.clone()
    v[..., 0, :] = 1
    return A - tau[..., None] * v * (v.mT @ A)


BENCHES = (
    Bench(
        op="linalg/householder",
        plot_over="n",
        run=_run,
        peers={"torch": _torch},
        inputs=lambda batch, n, dtype: (torch.randn(batch, n, n, dtype=dtype),),
        sweep=tuple({"batch": b, "n": n} for b, n in ((1000, 16), (200, 64), (8, 512), (1, 2048))),
        dtypes=(torch.float32, torch.float64),
        truth=_torch,
        reduces_over=lambda A: A.shape[-1],
        bytes_moved=lambda A: 2 * nbytes(A) + 3 * nbytes(A[..., 0]),
    ),
)
