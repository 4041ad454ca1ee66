# SPDX-License-Identifier: MIT
"""Triangular systems of DoubleFloats, [batch, n, k], beside float64."""

import torch
from torch import Tensor

import metalcore
from metalcore.precise import DoubleFloat

from ..harness import Bench


def _inputs(batch: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    A = torch.randn(batch, n, n, dtype=dtype) / n + 2 * torch.eye(n, dtype=dtype)
    return A, torch.randn(batch, n, k, dtype=dtype)


def _run(A: Tensor, B: Tensor) -> Tensor:
    return metalcore.trsm(DoubleFloat(A), DoubleFloat(B)).to(torch.float32)


def _float64(A: Tensor, B: Tensor) -> Tensor:
    X = torch.linalg.solve_triangular(A.double(), B.double(), upper=False)
    return X.to(A.dtype)


BENCHES = (
    Bench(
        op="precise/double_float_trsm",
        run=_run,
        peers={"torch": _float64},
        inputs=_inputs,
        sweep=({"batch": 100, "n": 16, "k": 16}, {"batch": 1, "n": 256, "k": 64}),
        dtypes=(torch.float32,),
        truth=_float64,
        reduces_over=lambda A, B: A.shape[-1],
    ),
)
