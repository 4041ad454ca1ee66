# SPDX-License-Identifier: MIT
"""Singular values, with and without vectors, of matrices [batch, m, n]: Gaussian, of condition 1e6,
and of half the rank."""

from collections.abc import Callable

import torch
from torch import Tensor

import metalcore
from metalcore._op import Op

from ..harness import Bench, Built, nbytes

_POINTS = (
    *((100, 32, 32), (200, 64, 64), (50, 128, 128), (500, 8, 8), (200, 16, 16), (16, 192, 192)),
    *((100, 64, 32), (100, 32, 64), (1, 4, 4), (1, 16, 16), (1, 64, 64), (1, 256, 256)),
    *((1, 1024, 1024), (1, 2048, 512), (1, 1024, 4096)),
)
_HARD = ((100, 32, 32), (200, 64, 64), (50, 128, 128))


def _gaussian(batch: int, m: int, n: int, dtype: torch.dtype) -> tuple[Tensor]:
    return (torch.randn(batch, m, n, dtype=dtype),) if batch > 1 else (torch.randn(m, n).to(dtype),)


def _ill_conditioned(batch: int, m: int, n: int, dtype: torch.dtype) -> tuple[Tensor]:
    Q, P = (torch.linalg.qr(torch.randn(batch, k, k).double())[0] for k in (m, n))
    return ((Q[..., : min(m, n)] * torch.logspace(0, -6, min(m, n)) @ P.mT).to(dtype),)


def _half_rank(batch: int, m: int, n: int, dtype: torch.dtype) -> tuple[Tensor]:
    rank = min(m, n) // 2
    return (torch.randn(batch, m, rank, dtype=dtype) @ torch.randn(batch, rank, n, dtype=dtype),)


def _torch(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    U, S, Vh = torch.linalg.svd(A, full_matrices=False)
    return U, S, Vh.mT


def _scipy(A: Tensor) -> Callable[[Tensor], tuple[Tensor, ...]]:
    from scipy.linalg import svd  # type: ignore[import-untyped, unused-ignore]

    if A.dim() > 2:
        raise NotImplementedError("one matrix")

    def run(A: Tensor) -> tuple[Tensor, ...]:
        U, S, Vh = (torch.from_numpy(x) for x in svd(A.numpy(), False, check_finite=False))
        return U, S, Vh.mT

    return run


def _mlx(A: Tensor) -> Callable[[Tensor], tuple[Tensor, ...]]:
    import mlx.core as mx  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import numpy

    if A.dtype != torch.float32 or A.shape[-1] != A.shape[-2] or A.shape[-1] > 256:
        raise NotImplementedError("small square float32 matrices: its U and V are full")

    def run(A: Tensor) -> tuple[Tensor, ...]:
        parts = mx.linalg.svd(mx.array(A.numpy()), stream=mx.cpu)
        mx.eval(parts)
        U, S, Vh = (torch.from_numpy(numpy.array(x)) for x in parts)
        return U, S, Vh.mT

    return run


def _scipy_values(A: Tensor) -> Callable[[Tensor], Tensor]:
    from scipy.linalg import svdvals  # type: ignore[import-untyped, unused-ignore]

    if A.dim() > 2:
        raise NotImplementedError("one matrix")
    return lambda A: torch.from_numpy(svdvals(A.numpy(), check_finite=False))


def _determined(U: Tensor, S: Tensor, V: Tensor) -> tuple[Tensor, ...]:
    return Op.all["svd"].determined((U, S, V, S))


BENCHES = tuple(
    Bench(
        op="linalg/svd",
        plot_over="n",
        kind=kind,
        run=lambda A: metalcore.svd(A),
        peers={"torch": _torch, "scipy": Built(_scipy), "mlx": Built(_mlx)},
        inputs=inputs,
        sweep=tuple({"batch": b, "m": m, "n": n} for b, m, n in points),
        dtypes=(torch.float32, torch.float64),
        truth=_torch,
        determined=_determined,
        # about twice as many rotations as rows pass over each column
        reduces_over=lambda A: 16 * max(A.shape[-2:]),
        bytes_moved=lambda A: nbytes(A, A, A),
        flops=lambda A: 20 * A.numel() * min(A.shape[-2:]),
    )
    for kind, inputs, points in (
        ("", _gaussian, _POINTS),
        ("condition 1e6", _ill_conditioned, _HARD),
        ("rank n/2", _half_rank, _HARD),
    )
)
BENCHES += (
    Bench(
        op="linalg/svdvals",
        plot_over="n",
        run=metalcore.svdvals,
        peers={"torch": torch.linalg.svdvals, "scipy": Built(_scipy_values)},
        inputs=_gaussian,
        sweep=tuple({"batch": b, "m": m, "n": n} for b, m, n in (*_POINTS, (1, 512, 512))),
        dtypes=(torch.float32, torch.float64),
        truth=torch.linalg.svdvals,
        reduces_over=lambda A: 16 * max(A.shape[-2:]),
        bytes_moved=lambda A: nbytes(A, A[..., 0]),
        flops=lambda A: 8 * A.numel() * min(A.shape[-2:]) // 3,
    ),
)
