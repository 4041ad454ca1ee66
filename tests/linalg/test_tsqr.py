# SPDX-License-Identifier: MIT
import itertools

import pytest
import torch

import metalcore
from metalcore._accuracy import error, tolerance
from metalcore.ops.linalg.tsqr import _blocks, _Rows
from tests.backends import Backend


@pytest.mark.parametrize(
    "size", [(1000, 7), (129, 3), (5, 5), (640, 10), (9, 0), (0, 0), (1, 1), (300, 70)]
)
def test_q_and_r(size: tuple[int, int], backend: Backend) -> None:
    for dtype in backend.dtypes:
        A = backend.randn(*size).to(dtype)
        Q, R = metalcore.tsqr(A)
        assert Q.dtype == R.dtype == dtype
        whole = Q.cpu().double()
        allowed = tolerance("qr", dtype, size[0])
        assert error(whole @ R.cpu().double(), A.cpu().double()) <= allowed
        assert error(whole.mT @ whole, torch.eye(size[1])) <= allowed
        assert torch.equal(R, R.triu())


def test_deficient_and_graded() -> None:
    A = torch.randn(800, 6) * torch.logspace(-20, 10, 6)
    A[:, 3] = A[:, 1]
    Q, R = metalcore.tsqr(A)
    assert error(Q.mT @ Q, torch.eye(6)) <= tolerance("qr", torch.float32, 800)
    norms = A.norm(dim=0)
    assert error((Q @ R) / norms, A / norms) <= tolerance("qr", torch.float32, 800)


def test_gradient() -> None:
    A = torch.randn(40, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(metalcore.tsqr, (A,))


def test_the_tree_is_that_of_the_size() -> None:
    whole = _Rows(None, 1, 0, 1000)
    parts = [_blocks(_Rows(None, 4, 250 * i, 1000), 3, 250) for i in range(4)]
    assert list(itertools.chain.from_iterable(parts)) == _blocks(whole, 3, 1000)
    assert len(_blocks(whole, 3, 1000)) == 64


def test_wide_matrices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tsqr: A must be \[M, N\] with M >= N, got \[3, 4\]"):
        metalcore.tsqr(torch.zeros(3, 4))
    assert "tsqr" in metalcore.__all__
