# SPDX-License-Identifier: MIT
import pytest
import torch
from torch import Tensor

import metalcore
from metalcore._accuracy import error, tolerance
from metalcore._check import LinAlgError
from tests.backends import Backend
from tests.linalg.inputs import MATRICES

NAME = "pinv"


def _low_rank(m: int, n: int, rank: int) -> Tensor:
    return torch.randn(3, m, rank, dtype=torch.float64) @ torch.randn(
        3, rank, n, dtype=torch.float64
    )


@pytest.mark.parametrize("size", [(6, 4), (4, 6), (5, 5), (1, 3), (0, 3), (3, 0)])
def test_equals_torch(backend: Backend, size: tuple[int, int]) -> None:
    for dtype in backend.dtypes:
        A = backend.randn(3, *size, dtype=dtype)
        P = metalcore.pinv(A)
        assert P.dtype == dtype
        truth = torch.linalg.pinv(A.cpu().double())
        # the inverse is as sensitive as the matrix is ill-conditioned
        worst = max(1.0, torch.linalg.cond(A.cpu().double()).max().item()) if A.numel() else 1.0
        assert error(P, truth) <= tolerance("svd", dtype, 16) * worst


@pytest.mark.parametrize("name", ["random", "zeros", "rank 1", "rank n/2", "repeated columns"])
def test_the_four_conditions_of_moore_and_penrose(name: str) -> None:
    for m, n in ((9, 6), (6, 9), (40, 33)):
        A = torch.stack([MATRICES[name](m, n) for _ in range(2)])
        P = metalcore.pinv(A)
        allowed = 1e-11
        assert error(A @ P @ A, A) <= allowed
        assert error(P @ A @ P, P) <= allowed
        for product in (A @ P, P @ A):
            assert error(product, product.mT) <= allowed


def test_the_cut_off() -> None:
    A = torch.diag(torch.tensor([1.0, 1e-2, 1e-4]))
    assert metalcore.pinv(A, rcond=1e-3).diagonal().tolist() == pytest.approx([1, 100, 0])
    batch = torch.stack([A, A])
    found = metalcore.pinv(batch, rcond=torch.tensor([1e-3, 1e-5])).diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(found, torch.tensor([[1, 100, 0], [1, 100, 1e4]]))


def test_symmetric() -> None:
    A = _low_rank(6, 4, 4)
    A = A @ A.mT
    torch.testing.assert_close(metalcore.pinv(A, hermitian=True), torch.linalg.pinv(A))


@pytest.mark.parametrize("size", [(5, 3), (3, 5), (4, 4)])
def test_gradients(size: tuple[int, int]) -> None:
    A = torch.randn(2, *size, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(metalcore.pinv, A)
    assert torch.autograd.gradgradcheck(metalcore.pinv, A)


def test_the_gradient_at_repeated_singular_values_and_low_rank_is_that_of_torch() -> None:
    for A in (torch.eye(4, dtype=torch.float64), _low_rank(5, 4, 2)):
        grads = []
        for function in (metalcore.pinv, torch.linalg.pinv):
            leaf = A.clone().requires_grad_()
            P = function(leaf)
            (grad,) = torch.autograd.grad((P * torch.arange(P.numel()).view_as(P)).sum(), leaf)
            grads.append(grad)
        assert error(grads[0], grads[1]) <= 1e-9


def test_maps() -> None:
    A = torch.randn(3, 4, 2)
    torch.testing.assert_close(torch.func.vmap(metalcore.pinv)(A), torch.linalg.pinv(A))


def test_errors_name_what_came() -> None:
    with pytest.raises(ValueError, match=rf"^{NAME}: A must be square matrices"):
        metalcore.pinv(torch.randn(3, 2), hermitian=True)
    with pytest.raises(LinAlgError, match="Look for NaN"):
        metalcore.pinv(torch.full((2, 3, 3), torch.nan))
