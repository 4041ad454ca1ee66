# SPDX-License-Identifier: MIT
"""Decompositions one after the other: each is one kernel, and none leaves its kernel."""

import torch

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
