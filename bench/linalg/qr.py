# SPDX-License-Identifier: MIT
"""QR decomposition, reduced, [batch, m, n]."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import metalcore

from ..harness import Bench, Built, nbytes

_POINTS = (
    *((500, 8, 8), (1000, 16, 16), (500, 32, 32), (100, 32, 64), (100, 64, 32), (100, 64, 64)),
    *((1, 8, 8), (1, 32, 32), (1, 512, 512), (1, 2048, 2048), (4, 24, 24), (50, 1000, 10)),
)
_SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)


def _inputs(batch: int, m: int, n: int, dtype: torch.dtype) -> tuple[Tensor]:
    return (torch.randn(batch, m, n, dtype=dtype),)


def _scipy(A: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    from scipy.linalg import qr  # type: ignore[import-untyped, unused-ignore]

    if A.shape[0] > 1:
        raise NotImplementedError("scipy takes one matrix")

    def factor(A: Tensor) -> tuple[Tensor, Tensor]:
        Q, R = qr(A[0].numpy(), mode="economic", check_finite=False)
        return torch.from_numpy(Q)[None], torch.from_numpy(R)[None]

    return factor


def _mlx(A: Tensor) -> Callable[..., list[Tensor]]:
    import mlx.core as mx  # type: ignore[import-not-found, unused-ignore]

    if A.dtype != torch.float32 or A.numel() > 2**20:
        raise NotImplementedError("float32 matrices of moderate size")
    a = mx.array(A.numpy())

    def factor(A: Tensor) -> list[Tensor]:
        results: Any = mx.linalg.qr(a, stream=mx.cpu)
        mx.eval(results)
        return [torch.from_dlpack(x) for x in results]

    return factor


def _flops(A: Tensor) -> int:
    *_, m, n = A.shape
    k = min(m, n)
    # R, and as much again for Q
    return A.shape[0] * (4 * m * n * k - 2 * k * k * (m + n) + 4 * k**3 // 3)


def _bench(sweep: tuple[tuple[int, int, int], ...], plot_over: str | None) -> Bench:
    return Bench(
        op="linalg/qr",
        run=metalcore.qr,
        peers={"torch": torch.linalg.qr, "scipy": Built(_scipy), "mlx": Built(_mlx)},
        inputs=_inputs,
        sweep=tuple({"batch": b, "m": m, "n": n} for b, m, n in sweep),
        dtypes=(torch.float32, torch.float64),
        truth=torch.linalg.qr,
        determined=lambda Q, R: (Q @ R, Q.mT @ Q, R.mT @ R),
        reduces_over=lambda A: max(A.shape[-2:]),
        bytes_moved=lambda A: (
            2 * nbytes(A) + A.element_size() * A.shape[0] * min(A.shape[-2:]) ** 2
        ),
        flops=_flops,
        plot_over=plot_over,
    )


BENCHES = (
    _bench(_POINTS, None),
    _bench(tuple((200, n, n) for n in _SIZES), "n"),
)
