# SPDX-License-Identifier: MIT
"""Eigenvalues, with and without eigenvectors, of symmetric matrices [batch, n, n]."""

from collections.abc import Callable

import torch
from torch import Tensor

import metalcore
from metalcore._op import Op

from ..harness import Bench, Built, nbytes

_POINTS = (
    *((100, 32), (200, 64), (50, 128)),
    *((1000, 2), (1000, 4), (1000, 8), (500, 16), (100, 48), (50, 96), (20, 192), (8, 256)),
    *((1, 2), (1, 8), (1, 16), (1, 32), (1, 64), (1, 128), (1, 512), (1, 1024)),
)
# scipy loops over the batch in Python
_SCIPY_UP_TO = 100


def _inputs(batch: int, n: int, dtype: torch.dtype) -> tuple[Tensor]:
    A = torch.randn(batch, n, n, dtype=dtype)
    return (A + A.mT,)


def _scipy(vectors: bool) -> Callable[..., Callable[[Tensor], list[Tensor]]]:
    def build(A: Tensor) -> Callable[[Tensor], list[Tensor]]:
        from scipy.linalg import eigh  # type: ignore[import-untyped, unused-ignore]

        if A.shape[0] > _SCIPY_UP_TO:
            raise NotImplementedError("scipy takes one matrix at a time")

        def run(A: Tensor) -> list[Tensor]:
            found = [
                eigh(a, eigvals_only=not vectors, check_finite=False, driver="evd")
                for a in A.numpy()
            ]
            columns = zip(*found, strict=True) if vectors else [found]
            return [torch.stack([torch.from_numpy(x) for x in column]) for column in columns]

        return run

    return build


def _mlx(vectors: bool) -> Callable[..., Callable[[Tensor], list[Tensor]]]:
    def build(A: Tensor) -> Callable[[Tensor], list[Tensor]]:
        import mlx.core as mx  # type: ignore[import-not-found, unused-ignore]
        import numpy

        solve = mx.linalg.eigh if vectors else mx.linalg.eigvalsh
        if A.dtype != torch.float32:
            raise NotImplementedError("mlx takes float32")
        given = mx.array(A.numpy())

        def run(A: Tensor) -> list[Tensor]:
            found = solve(given, stream=mx.cpu)
            mx.eval(found)
            results = found if vectors else [found]
            return [torch.from_numpy(numpy.array(x)) for x in results]

        return run

    return build


def _determined(L: Tensor, Q: Tensor) -> tuple[Tensor, ...]:
    return Op.all["eigh"].determined((L, Q, L.new_zeros(0)))[:3]


def _truth(A: Tensor) -> tuple[Tensor, Tensor]:
    L, Q = torch.linalg.eigh(A)
    return L, Q


_SWEEP = tuple({"batch": batch, "n": n} for batch, n in _POINTS)
_DTYPES = (torch.float32, torch.float64)

BENCHES = (
    Bench(
        op="linalg/eigh",
        run=metalcore.eigh,
        peers={"torch": torch.linalg.eigh, "scipy": Built(_scipy(True)), "mlx": Built(_mlx(True))},
        inputs=_inputs,
        sweep=_SWEEP,
        dtypes=_DTYPES,
        plot_over="n",
        truth=_truth,
        determined=_determined,
        reduces_over=lambda A: A.shape[-1],
        bytes_moved=lambda A: nbytes(A, A, A[..., 0]),
        flops=lambda A: 9 * A.shape[-1] * A.numel(),
    ),
    Bench(
        op="linalg/eigvalsh",
        run=metalcore.eigvalsh,
        peers={
            "torch": torch.linalg.eigvalsh,
            "scipy": Built(_scipy(False)),
            "mlx": Built(_mlx(False)),
        },
        inputs=_inputs,
        sweep=_SWEEP,
        dtypes=_DTYPES,
        plot_over="n",
        truth=torch.linalg.eigvalsh,
        reduces_over=lambda A: A.shape[-1],
        bytes_moved=lambda A: nbytes(A, A[..., 0]),
        flops=lambda A: 4 * A.shape[-1] * A.numel() // 3,
    ),
)
