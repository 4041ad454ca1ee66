# SPDX-License-Identifier: MIT
import math

import pytest
import torch

import metalcore
from metalcore._accuracy import error, tolerance
from tests.backends import Backend

NAME = "cond"
ORDERS = (None, "fro", "nuc", math.inf, -math.inf, 1, -1, 2, -2)


@pytest.mark.parametrize("p", ORDERS)
def test_equals_torch(backend: Backend, p: float | str | None) -> None:
    A = torch.randn(3, 4, 4) + 4 * torch.eye(4)
    found = metalcore.cond(A.to(backend.device), p)
    assert error(found, torch.linalg.cond(A.double(), p)) <= tolerance("svd", torch.float32, 4)


def test_rectangular_and_singular() -> None:
    A = torch.randn(3, 5, 2, dtype=torch.float64)
    torch.testing.assert_close(metalcore.cond(A), torch.linalg.cond(A))
    for p in ORDERS:
        found = metalcore.cond(torch.diag(torch.tensor([1.0, 0.0])), p)
        assert found == (0 if p == -2 else math.inf)
    assert metalcore.cond(torch.randn(2, 0, 0)).tolist() == [0, 0]


@pytest.mark.parametrize("p", [None, "fro", "nuc"])
def test_gradients(p: str | None) -> None:
    A = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda A: metalcore.cond(A, p), A)


def test_errors_name_what_came() -> None:
    with pytest.raises(ValueError, match=rf"^{NAME}: p must be None, .* got 3"):
        metalcore.cond(torch.eye(2), 3)
    with pytest.raises(ValueError, match=rf"^{NAME}: A must be square"):
        metalcore.cond(torch.randn(2, 3), "fro")
