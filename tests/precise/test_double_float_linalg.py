# SPDX-License-Identifier: MIT
"""Linear algebra in float64 on hardware that has none: DoubleFloats and `precision="float64"`."""

from collections.abc import Callable
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor

import metalcore
from metalcore import linalg
from metalcore.precise import DoubleFloat
from tests.backends import Backend

# Digits that the truth is computed with.
mpmath.mp.prec = 250


def _matrix(m: int, n: int, condition: float, seed: int = 0) -> Tensor:
    """Float32 numbers of that condition, in float64."""
    generator = torch.Generator().manual_seed(seed)
    U = torch.linalg.qr(torch.randn(m, m, generator=generator, dtype=torch.float64))[0]
    V = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]
    k = min(m, n)
    S = condition ** -torch.linspace(0, 1, k, dtype=torch.float64)
    return ((U[:, :k] * S) @ V[:, :k].T).float().double()


def _symmetric(n: int, condition: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    U = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]
    A = (U * condition ** -torch.linspace(0, 1, n, dtype=torch.float64)) @ U.T
    # of 48 bits, so that a DoubleFloat is this very matrix
    return DoubleFloat((A + A.T) / 2).to(torch.float64)


def _exactly(function: Callable[..., Any], *matrices: Tensor) -> Tensor:
    found = function(*(mpmath.matrix(M.tolist()) for M in matrices))
    rows = [[float(v) for v in row] for row in found.tolist()]
    return torch.tensor(rows, dtype=torch.float64)


def _solved(A: Any, B: Any) -> Any:
    columns = [mpmath.lu_solve(A, B[:, k]) for k in range(B.cols)]
    return mpmath.matrix([[c[i] for c in columns] for i in range(A.cols)])


def _least_squares(A: Any, B: Any) -> Any:
    if A.rows >= A.cols:
        return _solved(A.T * A, A.T * B)
    return A.T * _solved(A * A.T, B)


def _error(found: Tensor, truth: Tensor) -> float:
    return float((found.cpu().to(torch.float64) - truth).norm() / truth.norm())


@pytest.mark.parametrize("condition", [1e1, 1e6, 1e10])
def test_errors_are_of_float64(backend: Backend, condition: float) -> None:
    n = 12
    right = torch.randn(n, 2).double()
    for A, B in (
        (_matrix(n, n, condition), right),
        (_matrix(n, n, condition, 1) * 2.0**-60, right),
    ):
        given = [DoubleFloat(x).to(backend.device) for x in (A, B)]
        truth = _exactly(_solved, A, B)
        assert _error(linalg.solve(*given), truth) < 1e-13
    S = _symmetric(n, condition)
    truth = _exactly(mpmath.cholesky, S)
    assert _error(linalg.cholesky(DoubleFloat(S).to(backend.device)), truth) < 1e-13
    for m, k in ((n + 5, n), (n, n + 5)):
        A, B = _matrix(m, k, condition, 2), torch.randn(m, 2).double()
        found = linalg.lstsq(*(DoubleFloat(x).to(backend.device) for x in (A, B)))
        assert _error(found.solution, _exactly(_least_squares, A, B)) < 1e-13
        assert found.rank.item() == min(m, k)
        Q, R = linalg.qr(DoubleFloat(A).to(backend.device))
        q, r = Q.cpu().to(torch.float64), R.cpu().to(torch.float64)
        assert (q @ r - A).abs().max() < 1e-13 * A.abs().max()
        assert (q.T @ q - torch.eye(q.shape[1])).abs().max() < 1e-13
        assert torch.equal(r, r.triu())


def test_float32_has_not_the_digits() -> None:
    A, B = _matrix(12, 12, 1e6), torch.randn(12, 2).double()
    truth = _exactly(_solved, A, B)
    assert _error(linalg.solve(A.float(), B.float()), truth) > 1e-4
    with metalcore.trace() as t, metalcore.simulate():
        found = linalg.solve(A.float(), B.float(), precision="float64")
    assert isinstance(found, DoubleFloat)
    assert _error(found, truth) < 1e-13
    assert all(r.path.startswith("sim:") and r.dtype == "float32" for r in t.records)
    assert "double_float_matmul" in t.paths


def test_precision_is_float64_itself_on_a_cpu() -> None:
    A, B = _matrix(9, 9, 1e3).float(), torch.randn(9, 2)
    for found, truth in (
        (linalg.solve(A, B, precision="float64"), linalg.solve(A.double(), B.double())),
        (linalg.inv(A, precision="float64"), linalg.inv(A.double())),
        (linalg.qr(A, precision="float64")[1], linalg.qr(A.double())[1]),
        (
            linalg.lstsq(A, B, precision="float64").solution,
            linalg.lstsq(A.double(), B.double()).solution,
        ),
        (linalg.trsm(A, B, precision="float64"), linalg.trsm(A.double(), B.double())),
    ):
        assert type(found) is Tensor
        assert torch.equal(found, truth)
    S = _symmetric(9, 1e3).float()
    found = linalg.cholesky(S, precision="float64", upper=True)
    assert torch.equal(found, linalg.cholesky(S.double(), upper=True))
    with pytest.raises(ValueError, match=r"solve: precision must be"):
        linalg.solve(A, B, precision="float128")


def test_batches_vectors_and_empty_ones(backend: Backend) -> None:
    A = torch.stack([_matrix(5, 5, 1e2, s) for s in range(6)]).view(2, 3, 5, 5)
    b = torch.randn(3, 5).double()
    X = linalg.solve(DoubleFloat(A).to(backend.device), DoubleFloat(b[0]).to(backend.device))
    torch.testing.assert_close(
        X.cpu().to(torch.float64), torch.linalg.solve(A, b[0]), rtol=1e-12, atol=1e-12
    )
    for size in ((0, 5, 5), (2, 0, 0)):
        nothing = DoubleFloat(torch.zeros(size)).to(backend.device)
        assert linalg.solve(nothing, nothing).shape == size
        assert linalg.cholesky(nothing).shape == size
        assert linalg.lstsq(nothing, nothing).solution.shape == size
        assert linalg.qr(nothing)[0].shape == size
    zero = DoubleFloat(b * 0).to(backend.device)
    assert linalg.solve(DoubleFloat(A).to(backend.device), zero[0]).eq(0).all()


def test_torch_names_take_double_floats() -> None:
    A, B = _matrix(6, 6, 1e2), torch.randn(6, 2).double()
    X, Y, S = DoubleFloat(A), DoubleFloat(B), DoubleFloat(_symmetric(6, 10))
    pairs = [
        (torch.linalg.solve(X, Y), torch.linalg.solve(A, B)),
        (torch.linalg.inv(X), torch.linalg.inv(A)),
        (torch.linalg.lstsq(X, Y).solution, torch.linalg.lstsq(A, B).solution),
        (torch.linalg.qr(X)[1], torch.linalg.qr(A)[1]),
        (torch.linalg.qr(X, "r")[1], torch.linalg.qr(A)[1]),
        (torch.linalg.cholesky(S), torch.linalg.cholesky(S.to(torch.float64))),
        (
            torch.linalg.solve_triangular(X, Y.mT, upper=True, left=False),
            torch.linalg.solve_triangular(A, B.mT, upper=True, left=False),
        ),
    ]
    for found, truth in pairs:
        assert isinstance(found, DoubleFloat)
        torch.testing.assert_close(found.to(torch.float64), truth, rtol=1e-10, atol=1e-10)


GRADIENTS: dict[str, Callable[..., Any]] = {
    "solve": lambda A, B: linalg.solve(A, B),
    "inv": lambda A, B: linalg.inv(A),
    "cholesky": lambda A, B: linalg.cholesky(A @ A.mT + DoubleFloat(torch.eye(4)), upper=True),
    "qr": lambda A, B: sum(linalg.qr(A[..., :3])[i].sum(-2) for i in (0, 1)),
    "wide qr": lambda A, B: linalg.qr(A[..., :3, :])[1],
    "lstsq": lambda A, B: linalg.lstsq(A[..., :3], B).solution,
    "residuals": lambda A, B: linalg.lstsq(A[..., :3], B).residuals,
    "wide lstsq": lambda A, B: linalg.lstsq(A[..., :3, :], B[..., :3, :]).solution,
    "trsm": lambda A, B: linalg.trsm(A, B, transpose=True),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str) -> None:
    def function(A: Tensor, B: Tensor) -> Tensor:
        found = GRADIENTS[name](DoubleFloat(A), DoubleFloat(B))
        return found.to(torch.float64)  # type: ignore[no-any-return]

    A = (torch.randn(4, 4, dtype=torch.float64) + 3 * torch.eye(4)).requires_grad_()
    B = torch.randn(4, 2, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(function, (A, B))
    assert torch.autograd.gradgradcheck(function, (A, B))


def test_gradients_of_float32_leaves_in_the_simulator() -> None:
    A = _matrix(6, 6, 1e4).float().requires_grad_()
    B = torch.randn(6, 2).requires_grad_()
    wide = [A.detach().double().requires_grad_(), B.detach().double().requires_grad_()]
    torch.linalg.solve(*wide).square().sum().backward()
    with metalcore.simulate():
        (linalg.solve(A, B, precision="float64") ** 2).sum().backward()
    for narrow, truth in zip((A, B), wide, strict=True):
        assert narrow.grad is not None
        assert narrow.grad.dtype == torch.float32
        assert _error(narrow.grad, truth.grad) < 1e-6


def test_what_has_no_answer(backend: Backend) -> None:
    singular = DoubleFloat(torch.ones(2, 3, 3)).to(backend.device)
    with pytest.raises(torch.linalg.LinAlgError, match=r"solve: .*Use metalcore.lstsq"):
        linalg.solve(singular, singular)
    assert linalg.solve(singular, singular, check=False)[1].tolist() == [2, 2]
    indefinite = torch.diag(torch.tensor([1.0, 2.0, -1e-9])).double()
    indefinite = DoubleFloat(torch.stack([torch.eye(3).double(), indefinite])).to(backend.device)
    with pytest.raises(torch.linalg.LinAlgError, match=r"cholesky: .*Batch element 1"):
        linalg.cholesky(indefinite)
    L, info = linalg.cholesky(indefinite, check=False)
    assert info.tolist() == [0, 3]
    assert torch.equal(L[0].cpu().to(torch.float64), torch.eye(3).double())
    with pytest.raises(torch.linalg.LinAlgError, match=r"lstsq: .*full rank"):
        linalg.lstsq(singular[0], singular[0])
    with pytest.raises(torch.linalg.LinAlgError, match=r"qr: .*depend on each other"):
        linalg.qr(singular[0])
