# SPDX-License-Identifier: MIT
import pytest
import torch
from torch import Tensor

import metalcore
from metalcore._accuracy import error, tolerance
from tests.backends import Backend

NAME = "lstsq"


def _truth(A: Tensor, B: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.linalg.lstsq(A.cpu().double(), B.cpu().double(), driver="gelsd"))


@pytest.mark.parametrize("size", [(7, 3), (3, 7), (5, 5), (4, 1)])
def test_equals_torch(backend: Backend, size: tuple[int, int]) -> None:
    for dtype in backend.dtypes:
        A, B = backend.randn(4, *size, dtype=dtype), backend.randn(4, size[0], 2, dtype=dtype)
        found, truth = metalcore.lstsq(A, B), _truth(A, B)
        worst = torch.linalg.cond(A.cpu().double()).square().max().item()
        for i in (0, 1, 3):
            assert error(found[i], truth[i]) <= tolerance("svd", dtype, 16) * worst
        assert found.rank.cpu().equal(truth[2])


@pytest.mark.parametrize("size", [(90, 70), (70, 70), (70, 90)])
def test_one_large_system(size: tuple[int, int]) -> None:
    A, B = torch.randn(size, dtype=torch.float64), torch.randn(size[0], 3, dtype=torch.float64)
    for a, b in zip(metalcore.lstsq(A, B), _truth(A, B), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("size", [(2, 8, 6), (2, 6, 8), (80, 65), (65, 80)])
def test_of_many_solutions_the_smallest(size: tuple[int, ...]) -> None:
    *batch, m, n = size
    A = torch.randn(*batch, m, 3).double() @ torch.randn(*batch, 3, n).double()
    B = torch.randn(*batch, m, 2).double()
    found, truth = metalcore.lstsq(A, B), _truth(A, B)
    torch.testing.assert_close(found.solution, truth[0])
    assert (found.rank == 3).all()
    assert found.residuals.numel() == 0


@pytest.mark.parametrize("size", [(12, 7), (7, 12), (33, 33)])
def test_each_of_a_batch_has_its_own_rank(size: tuple[int, int]) -> None:
    m, n = size
    full = torch.randn(9, m, n).double()
    for i, rank in ((2, 3), (4, 1), (7, 0)):
        full[i] = torch.randn(m, rank).double() @ torch.randn(rank, n).double()
    B = torch.randn(9, m, 3).double()
    for dtype in (torch.float32, torch.float64):
        A = full.to(dtype)
        with metalcore.trace() as t:
            found = metalcore.lstsq(A, B.to(dtype))
        assert (t.records[0].op, t.records[0].variant) == ("svd_solve", "interleaved")
        truth = torch.linalg.lstsq(
            full, B, rcond=max(size) * torch.finfo(dtype).eps, driver="gelsd"
        )
        assert found.rank.equal(truth.rank)
        condition = (
            full.norm(dim=(1, 2)) * metalcore.pinv(full, rcond=1e-9).norm(dim=(1, 2))
        ).max()
        assert error(found.singular_values, truth.singular_values) <= tolerance("svd", dtype, n)
        allowed = tolerance("svd", dtype, m * n) * float(condition) ** 2
        assert error(found.solution, truth.solution) <= allowed
        # the others are not touched by those that need more work
        alone = metalcore.lstsq(A[[0, 1, 3, 5, 6, 8] * 2], B.to(dtype)[[0, 1, 3, 5, 6, 8] * 2])
        assert found.solution[[0, 1, 3, 5, 6, 8]].equal(alone.solution[:6])


def test_a_batch_with_nan_and_inf() -> None:
    A, b = torch.randn(9, 4, 3), torch.randn(9, 4)
    good = metalcore.lstsq(A, b).solution
    A[5, 1, 1] = torch.inf
    found = metalcore.lstsq(A, b)
    assert found.solution[5].isnan().all()
    assert found.solution[:5].equal(good[:5])
    A[5, 1, 1] = torch.nan
    with pytest.raises(RuntimeError, match=rf"^{NAME}: .*Batch element 5"):
        metalcore.lstsq(A, b)


def test_vectors_and_broadcast_batches() -> None:
    A, b = torch.randn(3, 5, 2).double(), torch.randn(3, 5).double()
    found = metalcore.lstsq(A, b)
    whole = metalcore.lstsq(A, b[..., None])
    torch.testing.assert_close(found.solution, whole.solution[..., 0])
    torch.testing.assert_close(found.residuals, whole.residuals[..., 0])
    wide = metalcore.lstsq(A[:1], torch.randn(4, 5, 1).double())
    assert wide.solution.shape == (4, 2, 1)


def test_the_cut_off() -> None:
    A, b = torch.diag(torch.tensor([1.0, 1e-4])), torch.ones(2)
    assert metalcore.lstsq(A, b, 1e-3).solution.tolist() == [1, 0]
    assert metalcore.lstsq(A, b).rank == 2


@pytest.mark.parametrize("size", [(5, 3), (3, 5)])
def test_gradients(size: tuple[int, int]) -> None:
    A = torch.randn(2, *size, dtype=torch.float64, requires_grad=True)
    B = torch.randn(2, size[0], 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda A, B: metalcore.lstsq(A, B).solution, (A, B))


def test_errors_name_what_came() -> None:
    with pytest.raises(TypeError, match=rf"^{NAME}: .*one dtype"):
        metalcore.lstsq(torch.randn(3, 2), torch.randn(3).double())
    with pytest.raises(ValueError, match=rf"^{NAME}: "):
        metalcore.lstsq(torch.randn(3, 2), torch.randn(4, 1))
