# SPDX-License-Identifier: MIT
"""A = P L U, [batch, m, n]."""

from collections.abc import Callable

import torch
from torch import Tensor

import metalcore

from ..harness import Bench, Built, nbytes

_POINTS = (
    *((500, 16, 16), (200, 32, 32), (200, 48, 48), (100, 64, 32), (100, 32, 64)),
    *((20, n, n) for n in (2, 5, 8, 64, 128)),
    *((1, n, n) for n in (2, 8, 32, 128, 512, 1024, 2048)),
)


def _inputs(batch: int, m: int, n: int, dtype: torch.dtype) -> tuple[Tensor]:
    return (torch.randn(batch, m, n, dtype=dtype),)


def _scipy(A: Tensor) -> Callable[..., tuple[Tensor, ...]]:
    from scipy.linalg import lu  # type: ignore[import-untyped, unused-ignore]

    return lambda A: tuple(torch.from_numpy(x) for x in lu(A.numpy(), check_finite=False))


BENCHES = (
    Bench(
        op="linalg/lu",
        plot_over="n",
        run=metalcore.lu,
        peers={"torch": torch.linalg.lu, "scipy": Built(_scipy)},
        inputs=_inputs,
        sweep=tuple({"batch": b, "m": m, "n": n} for b, m, n in _POINTS),
        dtypes=(torch.float32, torch.float64),
        truth=torch.linalg.lu,
        determined=lambda P, L, U: (P @ L @ U,),
        reduces_over=lambda A: max(A.shape),
        bytes_moved=lambda A: (
            nbytes(A) + nbytes(A) * (A.shape[-2] + A.shape[-1]) // max(A.shape[-2:])
        ),
    ),
)
