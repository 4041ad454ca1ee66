# SPDX-License-Identifier: MIT
"""Cholesky factors, [batch, n, n]."""

from collections.abc import Callable

import torch
from torch import Tensor

import metalcore
from metalcore._op import Op

from ..harness import Bench, Built, Function, nbytes

_BATCHED = ((500, 16), (1000, 32), (200, 48))
_SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def _inputs(batch: int, n: int, dtype: torch.dtype) -> tuple[Tensor]:
    x = torch.randn(batch, n, n, dtype=dtype)
    return (x @ x.mT / n + torch.eye(n, dtype=dtype),)


def _scipy(A: Tensor) -> Callable[..., Tensor]:
    from scipy.linalg import cholesky  # type: ignore[import-untyped, unused-ignore]

    if A.shape[0] > 8:
        raise NotImplementedError("scipy takes one matrix")
    return lambda A: torch.stack(
        [torch.from_numpy(cholesky(a.numpy(), lower=True, check_finite=False)) for a in A]
    )


def _mlx(A: Tensor) -> Callable[..., Tensor]:
    import mlx.core as mx  # type: ignore[import-not-found, unused-ignore]
    import numpy as np

    if A.dtype != torch.float32:
        raise NotImplementedError("mlx factors float32")
    a = mx.array(A.numpy())

    def factor(_: Tensor) -> Tensor:
        L = mx.linalg.cholesky(a, stream=mx.cpu)
        mx.eval(L)
        return torch.from_numpy(np.array(L))

    return factor


_PEERS: dict[str, Function | Built] = {
    "torch": torch.linalg.cholesky,
    "scipy": Built(_scipy),
    "mlx": Built(_mlx),
}


def _bench(points: tuple[tuple[int, int], ...], plot_over: str | None) -> Bench:
    return Bench(
        op="linalg/cholesky",
        run=metalcore.cholesky,
        peers=_PEERS,
        inputs=_inputs,
        sweep=tuple({"batch": b, "n": n} for b, n in points),
        dtypes=(torch.float32, torch.float64),
        truth=lambda A: Op.all["cholesky"].meaning(A, False)[0],
        reduces_over=lambda A: A.shape[-1],
        bytes_moved=lambda A: nbytes(A, A),
        flops=lambda A: A.numel() * A.shape[-1] // 3,
        plot_over=plot_over,
    )


BENCHES = (
    _bench(_BATCHED, None),
    _bench(tuple((100, n) for n in _SIZES), "n"),
    _bench((*((1, n) for n in _SIZES), (1, 512), (1, 1024), (1, 2048)), "n"),
    _bench(((2, 16), (3, 64), (5, 128), (20, 200), (4, 512)), None),
)
