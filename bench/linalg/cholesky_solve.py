# SPDX-License-Identifier: MIT
"""Systems A X = B by the Cholesky factor of A, [batch, n, k]."""

import torch
from torch import Tensor

import metalcore
from metalcore._op import Op

from ..harness import Bench, nbytes

_POINTS = (
    *((500, 16, 1), (1000, 32, 1), (500, 16, 16), (200, 48, 48), (100, 64, 64)),
    *((1, 4, 1), (1, 16, 16), (1, 64, 64), (1, 256, 256), (1, 1024, 1024), (20, 200, 64)),
)


def _inputs(batch: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    L = torch.randn(batch, n, n, dtype=dtype) / n + 2 * torch.eye(n, dtype=dtype)
    return torch.randn(batch, n, k, dtype=dtype), L.tril()


BENCHES = (
    Bench(
        op="linalg/cholesky_solve",
        plot_over="n",
        run=metalcore.cholesky_solve,
        peers={"torch": torch.cholesky_solve},
        inputs=_inputs,
        sweep=tuple({"batch": b, "n": n, "k": k} for b, n, k in _POINTS),
        dtypes=(torch.float32, torch.float64),
        truth=lambda B, L: Op.all["cholesky_solve"].meaning(B, L, False),
        reduces_over=lambda B, L: L.shape[-1],
        bytes_moved=lambda B, L: nbytes(B, B, L),
        flops=lambda B, L: 2 * L.shape[-1] * B.numel(),
    ),
)
