# SPDX-License-Identifier: MIT
"""Orthonormal columns, A [m, n] of condition 1e8, per method."""

import torch
from torch import Tensor

import metalcore

from ..harness import Bench, nbytes

_SIZES = ((1000, 10), (10, 1000), (3, 100), (1000, 200), (100000, 10), (512, 512))


def _inputs(m: int, n: int, dtype: torch.dtype) -> tuple[Tensor]:
    k = min(m, n)
    U, V = (torch.linalg.qr(torch.randn(s, k, dtype=torch.float64))[0] for s in (m, n))
    return ((U * torch.logspace(0, -8, k, dtype=torch.float64) @ V.mT).to(dtype),)


def _torch(A: Tensor) -> Tensor:
    tall = A if A.shape[-2] >= A.shape[-1] else A.mT
    Q: Tensor = torch.linalg.qr(tall)[0]
    return Q if A.shape[-2] >= A.shape[-1] else Q.mT


def _nearest(A: Tensor) -> Tensor:
    U, _, Vh = torch.linalg.svd(A, full_matrices=False)
    return U @ Vh


def _gram(Q: Tensor) -> tuple[Tensor]:
    return (Q.mT @ Q if Q.shape[-2] >= Q.shape[-1] else Q @ Q.mT,)


BENCHES = tuple(
    Bench(
        op="linalg/orthogonalize",
        plot_over="n",
        kind=method,
        run=lambda A, method=method: metalcore.orthogonalize(A, method),
        peers={"torch": _nearest if method == "polar" else _torch},
        inputs=_inputs,
        sweep=tuple({"m": m, "n": n} for m, n in _SIZES),
        dtypes=(torch.float32,),
        truth=_torch,
        determined=_gram,
        reduces_over=lambda A: max(A.shape),
        bytes_moved=lambda A: 2 * nbytes(A),
    )
    for method in ("auto", "cholesky", "polar")
)
