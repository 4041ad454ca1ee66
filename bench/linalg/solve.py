# SPDX-License-Identifier: MIT
"""A X = B, [batch, n, k]."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import metalcore

from ..harness import Bench, Built, nbytes

_POINTS = (
    *((500, 16, 16), (500, 16, 1), (200, 48, 48), (200, 48, 1), (200, 32, 32), (100, 64, 64)),
    *((20, n, 4) for n in (1, 2, 3, 5, 8, 12, 24, 33, 80, 128, 200)),
    *((1, n, 4) for n in (1, 2, 4, 5, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)),
)


def inputs(batch: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    A = torch.randn(batch, n, n, dtype=dtype) / (1 + n**0.5) + 2 * torch.eye(n, dtype=dtype)
    return A.roll(n // 2, -2), torch.randn(batch, n, k, dtype=dtype)


def _scipy(A: Tensor, B: Tensor) -> Callable[..., Tensor]:
    from scipy.linalg import solve  # type: ignore[import-untyped, unused-ignore]

    if A.shape[0] > 1:
        raise NotImplementedError("scipy takes one system")

    def one(A: Tensor, B: Tensor) -> Tensor:
        return torch.from_numpy(solve(A[0].numpy(), B[0].numpy(), check_finite=False))[None]

    return one


def _mlx(A: Tensor, B: Tensor) -> Callable[..., Tensor]:
    import mlx.core as mx  # type: ignore[import-not-found, unused-ignore]

    if A.dtype != torch.float32:
        raise NotImplementedError("MLX solves in float32")
    a, b = mx.array(A.numpy()), mx.array(B.numpy())

    def solve(*_: Any) -> Tensor:
        X = mx.linalg.solve(a, b, stream=mx.cpu)
        mx.eval(X)
        return torch.from_dlpack(X)  # type: ignore[no-any-return, unused-ignore]

    return solve


BENCHES = (
    Bench(
        op="linalg/solve",
        plot_over="n",
        run=metalcore.solve,
        peers={"torch": torch.linalg.solve, "scipy": Built(_scipy), "mlx": Built(_mlx)},
        inputs=inputs,
        sweep=tuple({"batch": b, "n": n, "k": k} for b, n, k in _POINTS),
        dtypes=(torch.float32, torch.float64),
        truth=torch.linalg.solve,
        reduces_over=lambda A, B: A.shape[-1],
        bytes_moved=lambda A, B: nbytes(A, B, B),
        flops=lambda A, B: 2 * A.numel() * A.shape[-1] // 3 + 2 * A.shape[-1] * B.numel(),
    ),
)
