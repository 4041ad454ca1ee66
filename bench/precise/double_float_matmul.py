# SPDX-License-Identifier: MIT
"""Products of n x n DoubleFloats, and systems solved with them, beside float64."""

import torch
from torch import Tensor

import metalcore
from metalcore.precise import DoubleFloat

from ..harness import Bench


def _inputs(n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(n, n, dtype=dtype) + 3 * n**0.5 * torch.eye(n), torch.randn(
        n, n, dtype=dtype
    )


def _multiply(A: Tensor, B: Tensor) -> Tensor:
    return (DoubleFloat(A) @ DoubleFloat(B)).to(torch.float32)


def _multiply_float64(A: Tensor, B: Tensor) -> Tensor:
    return (A.double() @ B.double()).to(A.dtype)


def _solve(A: Tensor, B: Tensor) -> Tensor:
    return metalcore.linalg.solve(DoubleFloat(A), DoubleFloat(B)).to(torch.float32)  # type: ignore[union-attr]


def _solve_float64(A: Tensor, B: Tensor) -> Tensor:
    return torch.linalg.solve(A.double(), B.double()).to(A.dtype)


BENCHES = tuple(
    Bench(
        op="precise/double_float_matmul",
        kind=kind,
        run=run,
        peers={"torch": peer},
        inputs=_inputs,
        sweep=tuple({"n": n} for n in (64, 256)),
        dtypes=(torch.float32,),
        truth=peer,
        reduces_over=lambda A, B: A.shape[-1],
        flops=lambda A, B: 2 * A.shape[0] ** 3,
    )
    for kind, run, peer in (
        ("product", _multiply, _multiply_float64),
        ("solve", _solve, _solve_float64),
    )
)
