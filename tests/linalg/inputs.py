# SPDX-License-Identifier: MIT
"""Matrices that decompositions go wrong on, by name. All are made in float64 and then rounded."""

from collections.abc import Callable

import torch
from torch import Tensor

Make = Callable[[int, int], Tensor]


def _randn(m: int, n: int) -> Tensor:
    return torch.randn(m, n, dtype=torch.float64)


def orthogonal(n: int) -> Tensor:
    return torch.linalg.qr(_randn(n, n))[0] if n else _randn(0, 0)


def with_singular_values(m: int, n: int, values: Tensor) -> Tensor:
    k = min(m, n)
    return orthogonal(m)[:, :k] * values[:k] @ orthogonal(n)[:, :k].mT


def with_eigenvalues(values: Tensor) -> Tensor:
    Q = orthogonal(values.numel())
    return Q * values @ Q.mT


def _condition(m: int, n: int, condition: float) -> Tensor:
    exponents = torch.linspace(0, 1, max(1, min(m, n)), dtype=torch.float64)
    return with_singular_values(m, n, condition**-exponents)


def _repeated_columns(m: int, n: int) -> Tensor:
    a = _randn(m, n)
    a[:, n // 2 :] = a[:, : n - n // 2].clone()
    return a


def _zero_column(m: int, n: int) -> Tensor:
    a = _randn(m, n)
    a[:, n // 2 : n // 2 + 1] = 0
    return a


def _graded(m: int, n: int) -> Tensor:
    return _randn(m, n) * torch.logspace(-30, 20, n, dtype=torch.float64)


def _hilbert(m: int, n: int) -> Tensor:
    return 1 / (torch.arange(m).double()[:, None] + torch.arange(n).double() + 1)


MATRICES: dict[str, Make] = {
    "random": _randn,
    "zeros": lambda m, n: torch.zeros(m, n, dtype=torch.float64),
    "identity": lambda m, n: torch.eye(m, n, dtype=torch.float64),
    "rank 1": lambda m, n: _randn(m, 1) @ _randn(1, n),
    "rank n/2": lambda m, n: _randn(m, min(m, n) // 2) @ _randn(min(m, n) // 2, n),
    "repeated columns": _repeated_columns,
    "one zero column": _zero_column,
    "graded": _graded,
    "scaled by 1e-30": lambda m, n: _randn(m, n) * 1e-30,
    "scaled by 1e30": lambda m, n: _randn(m, n) * 1e30,
    "condition 1e4": lambda m, n: _condition(m, n, 1e4),
    "condition 1e8": lambda m, n: _condition(m, n, 1e8),
    "condition 1e12": lambda m, n: _condition(m, n, 1e12),
    "repeated singular values": lambda m, n: with_singular_values(
        m, n, 1 + (torch.arange(min(m, n)) // 2).double()
    ),
    "clustered singular values": lambda m, n: with_singular_values(
        m, n, 1 + 1e-7 * torch.arange(min(m, n)).double()
    ),
    "hilbert": _hilbert,
    "triangular": lambda m, n: _randn(m, n).triu(),
}
"""General matrices [m, n]."""

SYMMETRIC: dict[str, Callable[[int], Tensor]] = {
    "random": lambda n: _randn(n, n) + _randn(n, n).mT,
    "zeros": lambda n: torch.zeros(n, n, dtype=torch.float64),
    "identity": lambda n: torch.eye(n, dtype=torch.float64),
    "rank 1": lambda n: with_eigenvalues((torch.arange(n) == 0).double()),
    "rank n/2": lambda n: with_eigenvalues(
        (torch.arange(n) < n // 2) * (1.0 + torch.arange(n).double())
    ),
    "plus and minus lambda": lambda n: with_eigenvalues(
        (1 + torch.arange(n) // 2).double() * (1 - 2.0 * (torch.arange(n) % 2))
    ),
    "exchange": lambda n: torch.eye(n, dtype=torch.float64).flip(0),
    "repeated": lambda n: with_eigenvalues(1.0 + (torch.arange(n) // 3).double()),
    "clustered": lambda n: with_eigenvalues(1 + 1e-7 * torch.arange(n).double()),
    "graded": lambda n: (
        torch.logspace(-15, 10, n, dtype=torch.float64).outer(
            torch.logspace(-15, 10, n, dtype=torch.float64)
        )
        * (_randn(n, n) + _randn(n, n).mT)
    ),
    "scaled by 1e-30": lambda n: (_randn(n, n) + _randn(n, n).mT) * 1e-30,
    "scaled by 1e30": lambda n: (_randn(n, n) + _randn(n, n).mT) * 1e30,
    "condition 1e8": lambda n: with_eigenvalues(torch.logspace(0, -8, n, dtype=torch.float64)),
    "hilbert": lambda n: _hilbert(n, n),
    "tridiagonal": lambda n: (
        torch.diag(torch.full((n,), 2.0).double())
        - torch.diag(torch.ones(max(0, n - 1)).double(), 1)
        - torch.diag(torch.ones(max(0, n - 1)).double(), -1)
    ),
}
"""Symmetric matrices [n, n]; what is not symmetric to the last bit is so in its lower triangle."""

POSITIVE: dict[str, Callable[[int], Tensor]] = {
    "random": lambda n: with_eigenvalues(1 + torch.rand(n, dtype=torch.float64)),
    "identity": lambda n: torch.eye(n, dtype=torch.float64),
    "condition 1e4": lambda n: with_eigenvalues(torch.logspace(0, -4, n, dtype=torch.float64)),
    "scaled by 1e-30": lambda n: (
        with_eigenvalues(torch.linspace(1, 2, n, dtype=torch.float64)) * 1e-30
    ),
    "scaled by 1e30": lambda n: (
        with_eigenvalues(torch.linspace(1, 2, n, dtype=torch.float64)) * 1e30
    ),
    "graded": lambda n: (
        torch.logspace(-15, 10, n, dtype=torch.float64).outer(
            torch.logspace(-15, 10, n, dtype=torch.float64)
        )
        * with_eigenvalues(torch.linspace(1, 2, n, dtype=torch.float64))
    ),
}
"""Positive definite matrices [n, n]."""
