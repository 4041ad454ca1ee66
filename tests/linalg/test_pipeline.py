# SPDX-License-Identifier: MIT
"""Decompositions one after the other: each is one kernel, none leaves its kernel, none waits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import metalcore
from metalcore._accuracy import error, tolerance
from tests.backends import Backend


def test_qr_solve_svd_and_truncation_are_a_kernel_each(backend: Backend) -> None:
    # the simulator needs no more to show the path
    batch = 6 if backend.name == "sim" else 200
    A = backend.randn(batch, 32, 32) + 8 * torch.eye(32, device=backend.device)
    with metalcore.trace() as t:
        Q, R = metalcore.qr(A)
        X = metalcore.solve(R, Q.mT)
        U, S, V = metalcore.svd(X)
        low = U[..., :8] * S[..., None, :8] @ V[..., :8].mT
    assert [r.op for r in t.records] == ["qr", "solve", "svd"]
    for record in t.records:
        assert record.path.startswith(f"{backend.path}:")
        assert " + " not in record.variant
        assert record.variant != "lapack"
    # A = QR, so X is the inverse of A, and its best approximation of rank 8 leaves the ninth value
    exact = torch.linalg.svdvals(A.cpu().double().inverse())
    left = torch.linalg.matrix_norm(X.cpu().double() - low.cpu().double(), ord=2)
    assert error(left, exact[..., 8]) <= tolerance("svd", torch.float32, 32)


class _NoWaiting(TorchDispatchMode):
    """Refuses what reads a value back from the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        assert name not in {"_local_scalar_dense", "nonzero", "is_nonzero", "equal"}, name
        return func(*args, **(kwargs or {}))


UNCHECKED: dict[str, Callable[[Tensor], Any]] = {
    "cholesky": lambda A: metalcore.cholesky(A @ A.mT, check=False),
    "det": metalcore.det,
    "eigh": lambda A: metalcore.eigh(A + A.mT, check=False),
    "inv": lambda A: metalcore.inv(A, check=False),
    "lu": metalcore.lu,
    "orthogonalize": metalcore.orthogonalize,
    "orthogonalize by cholesky": lambda A: metalcore.orthogonalize(A, "cholesky"),
    "polar": metalcore.polar,
    "qr": metalcore.qr,
    "qr_solve": lambda A: metalcore.qr_solve(A, A),
    "solve": lambda A: metalcore.solve(A, A, refine=True, check=False),
    "svd": lambda A: metalcore.svd(A, check=False),
    "svdvals": lambda A: metalcore.svdvals(A, check=False),
    "trsm": lambda A: metalcore.trsm(A, A),
}


@pytest.mark.parametrize("name", UNCHECKED)
def test_nothing_waits_for_the_device_without_checks(name: str) -> None:
    for n in (5, 34, 66):
        with _NoWaiting(), metalcore.simulate(checks="none"):
            UNCHECKED[name](torch.randn(2, n, n) + 3 * torch.eye(n))


def test_waiting_is_noticed() -> None:
    with pytest.raises(AssertionError, match="_local_scalar_dense"), _NoWaiting():
        bool(torch.ones(2).all())
