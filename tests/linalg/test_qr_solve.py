# SPDX-License-Identifier: MIT
"""Least squares by "qr_solve", a formula over qr and trsm."""

import pytest
import torch

import metalcore
from metalcore._accuracy import error, tolerance
from tests.backends import Backend

CASES = [((7,), 12, 5, 3), ((2, 3), 9, 9, 2), ((), 20, 8, 4), ((3,), 40, 6, 9), ((2,), 5, 3, 0)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_torch(backend: Backend, case: tuple[tuple[int, ...], int, int, int]) -> None:
    batch, m, n, k = case
    for dtype in backend.dtypes:
        A = (backend.randn(*batch, m, n) + 3 * torch.eye(m, n, device=backend.device)).to(dtype)
        B = backend.randn(*batch, m, k, dtype=dtype)
        X = metalcore.qr_solve(A, B)
        truth = torch.linalg.pinv(A.cpu().double()) @ B.cpu().double()
        assert X.dtype == dtype
        assert error(X, truth) <= tolerance("qr", dtype, m)


def test_every_path_gives_the_same() -> None:
    A, B = torch.randn(9, 12, 6) + 3 * torch.eye(12, 6), torch.randn(9, 12, 2)
    augmented = metalcore.qr_solve(A, B)
    with metalcore.trace() as t:
        by_q = metalcore.qr_solve(A, B)
    assert [r.op for r in t.records] == ["qr", "trsm"]
    alone = torch.stack([metalcore.qr_solve(a, b) for a, b in zip(A, B, strict=True)])
    for X in (by_q, alone):
        assert error(X, augmented.double()) <= tolerance("qr", torch.float32, 12)


def test_vectors_and_broadcast_batches(backend: Backend) -> None:
    A = backend.randn(3, 8, 4) + 3 * torch.eye(8, 4, device=backend.device)
    inverse = torch.linalg.pinv(A.cpu().double())
    for B in (backend.randn(3, 8), backend.randn(8), backend.randn(8, 2)):
        columns = (B if B.shape == (8, 2) else B[..., None]).cpu().double()
        X = metalcore.qr_solve(A, B)
        truth = inverse @ columns
        assert error(X if B.shape == (8, 2) else X[..., None], truth) <= tolerance(
            "qr", torch.float32, 8
        )


def test_scales_of_columns_do_not_matter(backend: Backend) -> None:
    scale = torch.logspace(-20, 15, 6, dtype=torch.float64)
    A = backend.randn(9, 10, 6) + 3 * torch.eye(10, 6, device=backend.device)
    scaled = (A.cpu().double() * scale).float()
    B = backend.randn(9, 10, 1)
    X = metalcore.qr_solve(scaled.to(backend.device), B).cpu().double() * scale[:, None]
    truth = torch.linalg.pinv(scaled.double() / scale) @ B.cpu().double()
    assert error(X, truth) <= tolerance("qr", torch.float32, 10)


def test_gradients_are_those_of_least_squares() -> None:
    A = (torch.randn(2, 4, 3) + 2 * torch.eye(4, 3)).double().requires_grad_()
    B = torch.randn(2, 4, 2).double().requires_grad_()
    assert torch.autograd.gradcheck(metalcore.qr_solve, (A, B))


BAD = [
    (
        lambda: metalcore.qr_solve(torch.randn(3, 4), torch.randn(3)),
        "qr_solve: A must have at least as many rows as columns, got [3, 4]; "
        "use torch.linalg.lstsq",
    ),
    (
        lambda: metalcore.qr_solve(torch.randn(4), torch.randn(4)),
        "qr_solve: A must be matrices [..., M, N], got [4]",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=[b[1][:40] for b in BAD])
def test_bad_input_is_named(call, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="qr_solve") as caught:
        call()
    assert str(caught.value) == message
