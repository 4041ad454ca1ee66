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


def _of_exact(function: Callable[..., Any], A: Tensor) -> list[Tensor]:
    """What mpmath finds, as tensors: numbers, or matrices of them."""

    def tensor(M: Any) -> Tensor:
        rows = M.tolist() if M.cols > 1 else list(M)
        return torch.tensor(mpmath.matrix(rows).tolist(), dtype=torch.float64).squeeze(-1)

    return [tensor(M) for M in function(mpmath.matrix(A.tolist()))]


@pytest.mark.parametrize("condition", [1e1, 1e6, 1e10])
def test_errors_of_values_and_vectors_are_of_float64(backend: Backend, condition: float) -> None:
    # couplings of vectors have 70 bits
    limit = max(1e-13, 2.0**-70 * condition)
    S = _symmetric(12, condition)
    L, Q = _of_exact(mpmath.eigsy, S)
    order = L.argsort()
    L, Q = L[order], Q[:, order]
    values, vectors = (
        x.cpu().to(torch.float64) for x in linalg.eigh(DoubleFloat(S).to(backend.device))
    )
    # each by itself, also the smallest
    assert ((values - L) / L).abs().max() < limit
    assert (vectors * (vectors * Q).sum(0).sign() - Q).abs().max() < limit
    for m, n in ((12, 12), (17, 12), (12, 17)):
        A = _matrix(m, n, condition, 2)
        U, S, Vt = _of_exact(mpmath.svd_r, A)
        given = DoubleFloat(A).to(backend.device)
        u, s, v = (x.cpu().to(torch.float64) for x in linalg.svd(given))
        signs = (u * U).sum(0).sign()
        assert ((s - S) / S).abs().max() < limit
        assert (u * signs - U).abs().max() < limit
        assert (v * signs - Vt.T).abs().max() < limit
        truth = _exactly(lambda A: _least_squares(A, mpmath.eye(A.rows)), A)
        assert _error(linalg.pinv(given), truth) < limit


def test_values_and_vectors_in_float32_are_not(backend: Backend) -> None:
    A = _symmetric(12, 1e6)
    L = _of_exact(mpmath.eigsy, A)[0].sort()[0]
    narrow = linalg.eigvalsh(A.float().to(backend.device)).cpu()
    assert ((narrow - L) / L).abs().max() > 1e-2


def _spectrum(*values: float) -> Tensor:
    n = len(values)
    U = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0]
    A = (U * torch.tensor(values, dtype=torch.float64)) @ U.T
    return DoubleFloat((A + A.T) / 2).to(torch.float64)


SPECTRA = {
    "none": lambda: torch.zeros(7, 7, dtype=torch.float64),
    "identity": lambda: torch.eye(7, dtype=torch.float64),
    "ones": lambda: torch.ones(9, 9, dtype=torch.float64),
    "both signs": lambda: _spectrum(*range(-5, 6)),
    "equal": lambda: _spectrum(*[1.0] * 5, *[2.0] * 5, *[-2.0] * 5),
    "clusters": lambda: _spectrum(
        *(1 + 1e-9 * i for i in range(6)), *(2 + 1e-5 * i for i in range(6)), -1, -1 - 1e-12
    ),
    "graded": lambda: _spectrum(*(10.0**-i for i in range(24))),
    "tiny": lambda: _spectrum(*range(1, 8)) * 2.0**-100,
}


@pytest.mark.parametrize("name", SPECTRA)
def test_spectra_of_all_kinds(backend: Backend, name: str) -> None:
    A = SPECTRA[name]()
    given, scale = DoubleFloat(A).to(backend.device), float(A.abs().max()) or 1.0
    eye = torch.eye(len(A), dtype=torch.float64)
    L, Q = (x.cpu().to(torch.float64) for x in linalg.eigh(given, "U"))
    assert (A @ Q - Q * L).abs().max() < 1e-13 * scale
    assert (Q.T @ Q - eye).abs().max() < 1e-13
    assert (L.diff() >= 0).all()
    U, S, V = (x.cpu().to(torch.float64) for x in linalg.svd(given))
    assert ((U * S) @ V.T - A).abs().max() < 2e-13 * scale
    assert max((U.T @ U - eye).abs().max(), (V.T @ V - eye).abs().max()) < 1e-13
    assert (S.diff() <= 0).all()


def test_pseudo_inverses_of_any_rank(backend: Backend) -> None:
    for A in (
        torch.randn(9, 3).double() @ torch.randn(3, 5).double(),
        _spectrum(3.0, 1.0, 0.0, 0.0, -2.0),
        torch.zeros(4, 3, dtype=torch.float64),
    ):
        A = DoubleFloat(A).to(torch.float64)
        is_symmetric = torch.equal(A, A.T)
        for hermitian in {False, is_symmetric}:
            given = DoubleFloat(A).to(backend.device)
            P = linalg.pinv(given, hermitian=hermitian).cpu().to(torch.float64)
            for left, right in ((A @ P @ A, A), (P @ A @ P, P), (A @ P, (A @ P).T)):
                torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)
    limited = linalg.pinv(DoubleFloat(torch.diag(torch.tensor([1.0, 0.1]))), rcond=0.2)
    assert torch.equal(limited.to(torch.float64), torch.diag(torch.tensor([1.0, 0.0])).double())


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
        (linalg.svd(A, precision="float64")[1], linalg.svd(A.double())[1]),
        (linalg.svdvals(A, precision="float64"), linalg.svdvals(A.double())),
        (linalg.pinv(A, precision="float64"), linalg.pinv(A.double())),
        (linalg.eigh(A, precision="float64")[0], linalg.eigh(A.double())[0]),
        (linalg.eigvalsh(A, precision="float64"), linalg.eigvalsh(A.double())),
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
        assert linalg.eigh(nothing)[1].shape == size
        assert linalg.svd(nothing)[2].shape == size
        assert linalg.pinv(nothing).shape == size
    zero = DoubleFloat(b * 0).to(backend.device)
    assert linalg.solve(DoubleFloat(A).to(backend.device), zero[0]).eq(0).all()


def _product(U: Any, S: Any, Vh: Any) -> Any:
    """Of full matrices: U is square."""
    assert U.shape[-1] == U.shape[-2]
    return (U[:, : len(S)] * S) @ Vh


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
        (torch.linalg.eigh(S)[0], torch.linalg.eigh(S.to(torch.float64))[0]),
        (torch.linalg.eigvalsh(S, "U"), torch.linalg.eigvalsh(S.to(torch.float64))),
        (torch.linalg.svdvals(X), torch.linalg.svdvals(A)),
        (_product(*torch.linalg.svd(X[:, :4])), A[:, :4]),
        (torch.linalg.pinv(X[:4]), torch.linalg.pinv(A[:4])),
        (
            torch.linalg.solve_triangular(X, Y.mT, upper=True, left=False),
            torch.linalg.solve_triangular(A, B.mT, upper=True, left=False),
        ),
    ]
    for found, truth in pairs:
        assert isinstance(found, DoubleFloat)
        torch.testing.assert_close(found.to(torch.float64), truth, rtol=1e-10, atol=1e-10)


def _squares(U: Any, S: Any, V: Any) -> Any:
    """Whatever the signs of the vectors."""
    return (U**2).sum(-2) + (U[..., 0, :] * V[..., 0, :]) + (V**2)[..., 0, :] * S


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
    "eigvalsh": lambda A, B: linalg.eigvalsh(A + A.mT),
    "eigh": lambda A, B: linalg.eigh(A + A.mT)[1] ** 2,
    "svdvals": lambda A, B: linalg.svdvals(A[..., :3]),
    "svd": lambda A, B: _squares(*linalg.svd(A[..., :3])),
    "pinv": lambda A, B: linalg.pinv(A[..., :3]),
    "wide pinv": lambda A, B: linalg.pinv(A[..., :3, :]),
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
    wrong = DoubleFloat(torch.full((2, 3, 3), torch.nan)).to(backend.device)
    for name in ("eigh", "svd", "pinv"):
        with pytest.raises(torch.linalg.LinAlgError, match=rf"{name}: .*Look for NaN"):
            getattr(linalg, name)(wrong)
    assert linalg.eigvalsh(wrong, check=False)[1].all()
    assert linalg.svd(wrong, compute_uv=False, check=False)[3].all()
    with pytest.raises(torch.linalg.LinAlgError, match=r"qr: .*depend on each other"):
        linalg.qr(singular[0])
