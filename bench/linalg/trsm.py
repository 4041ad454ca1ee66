# SPDX-License-Identifier: MIT
"""Triangular systems A X = B, lower and transposed, [batch, n, k]."""

from collections.abc import Callable

import torch
from torch import Tensor

import metalcore

from ..harness import Bench, Built, nbytes

_POINTS = (
    *((500, 16, 1), (1000, 32, 1), (500, 16, 16), (200, 48, 48), (100, 64, 64)),
    *((1, 4, 1), (1, 16, 16), (1, 64, 64), (1, 256, 256), (1, 1024, 1024), (20, 200, 64)),
)


def _inputs(batch: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    A = torch.randn(batch, n, n, dtype=dtype) / n + 2 * torch.eye(n, dtype=dtype)
    return A, torch.randn(batch, n, k, dtype=dtype)


def _scipy(A: Tensor, B: Tensor, transpose: bool) -> Callable[..., Tensor]:
    from scipy.linalg import solve_triangular  # type: ignore[import-untyped, unused-ignore]

    if A.shape[0] > 1:
        raise NotImplementedError("scipy takes one system")

    def solve(A: Tensor, B: Tensor) -> Tensor:
        X = solve_triangular(
            A[0].numpy(), B[0].numpy(), trans=int(transpose), lower=True, check_finite=False
        )
        return torch.from_numpy(X)[None]

    return solve


def _torch(A: Tensor, B: Tensor, transpose: bool) -> Tensor:
    return torch.linalg.solve_triangular(A.mT if transpose else A, B, upper=transpose)


BENCHES = tuple(
    Bench(
        op="linalg/trsm",
        plot_over="n",
        kind="transposed" if transpose else "",
        run=lambda A, B, transpose=transpose: metalcore.trsm(A, B, True, transpose),
        peers={
            "torch": lambda A, B, transpose=transpose: _torch(A, B, transpose),
            "scipy": Built(lambda A, B, transpose=transpose: _scipy(A, B, transpose)),
        },
        inputs=_inputs,
        sweep=tuple({"batch": b, "n": n, "k": k} for b, n, k in _POINTS),
        dtypes=(torch.float32, torch.float64),
        truth=lambda A, B, transpose=transpose: _torch(A, B, transpose),
        reduces_over=lambda A, B: A.shape[-1],
        bytes_moved=lambda A, B: nbytes(A, B, B),
        flops=lambda A, B: A.shape[-1] * B.numel(),
    )
    for transpose in (False, True)
)
