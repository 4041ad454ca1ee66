# SPDX-License-Identifier: MIT
"""Overridden functions of linear algebra return the strides of torch's, and take None as torch
does."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import metalcore
from metalcore._accuracy import error, tolerance
from metalcore.patch import _replace
from tests.backends import Backend
from tests.patch.forced import ops_of

SHAPES = [(9, 4, 4), (9, 7, 3), (9, 3, 7), (2, 3, 5, 5), (6, 6), (20, 17, 17), (9, 1, 1)]
Call = Callable[[], Any]


def _calls(X: Tensor) -> Iterator[tuple[str, Call]]:
    """Every overridden function of linear algebra that takes matrices of this shape."""
    L = torch.linalg
    for mode in ("reduced", "complete", "r"):
        yield "torch.linalg.qr", lambda mode=mode: L.qr(X, mode)
    for full in (True, False):
        yield "torch.linalg.svd", lambda full=full: L.svd(X, full_matrices=full)
    yield "torch.linalg.lu", lambda: L.lu(X)
    yield "torch.linalg.pinv", lambda: L.pinv(X)
    yield "torch.linalg.svdvals", lambda: L.svdvals(X)
    yield "torch.linalg.matrix_rank", lambda: L.matrix_rank(X)
    yield "torch.linalg.cond", lambda: L.cond(X)
    for keepdim in (False, True):
        for p in (2, -2, "nuc"):
            yield (
                "torch.linalg.matrix_norm",
                lambda p=p, keep=keepdim: L.matrix_norm(X, p, keepdim=keep),
            )
    for driver in ("gelsy", "gelsd"):
        for B in (X, X[..., :1], X[..., :2].mT.contiguous().mT):
            yield "torch.linalg.lstsq", lambda B=B, d=driver: L.lstsq(X, B, driver=d)
    if X.shape[-1] == X.shape[-2]:
        yield from _calls_of_square(X)


def _calls_of_square(X: Tensor) -> Iterator[tuple[str, Call]]:
    L = torch.linalg
    A = X @ X.mT + torch.eye(X.shape[-1], device=X.device)
    for upper in (False, True):
        factor = L.cholesky(A, upper=upper)
        yield "torch.linalg.cholesky", lambda u=upper: L.cholesky(A, upper=u)
        yield "torch.linalg.cholesky_ex", lambda u=upper: L.cholesky_ex(A, upper=u)
        for B in (X, X.mT, X[..., :1], X[..., :2], X[..., -1:].expand_as(X)):
            yield (
                "torch.cholesky_solve",
                lambda B=B, u=upper, f=factor: torch.cholesky_solve(B, f, u),
            )
            yield (
                "torch.linalg.solve_triangular",
                lambda B=B, u=upper, f=factor: L.solve_triangular(f, B, upper=u),
            )
        yield "torch.cholesky_inverse", lambda u=upper, f=factor: torch.cholesky_inverse(f, u)
    yield "torch.Tensor.cholesky_solve", lambda: X.cholesky_solve(L.cholesky(A))
    yield "torch.Tensor.cholesky_inverse", lambda: L.cholesky(A).cholesky_inverse()
    for B in (X, X.mT, X[..., :1], X[..., 0], X[..., :2]):
        yield "torch.linalg.solve", lambda B=B: L.solve(A, B)
        yield "torch.linalg.solve_ex", lambda B=B: L.solve_ex(A, B)
    for M in (A, A.mT):
        yield "torch.linalg.inv", lambda M=M: L.inv(M)
        yield "torch.linalg.inv_ex", lambda M=M: L.inv_ex(M)
    yield "torch.inverse", lambda: torch.inverse(A)
    yield "torch.Tensor.inverse", lambda: A.inverse()
    for uplo in "LU":
        yield "torch.linalg.eigh", lambda u=uplo: L.eigh(A, u)
        yield "torch.linalg.eigvalsh", lambda u=uplo: L.eigvalsh(A, u)
    yield "torch.linalg.pinv", lambda: L.pinv(A, hermitian=True)
    for owner in ("torch.linalg.", "torch."):
        for name in ("det", "slogdet"):
            yield owner + name, lambda o=owner, n=name: getattr(L if "linalg" in o else torch, n)(A)
    yield "torch.Tensor.det", lambda: A.det()
    yield "torch.Tensor.slogdet", lambda: A.slogdet()


def _strides(results: Any) -> list[tuple[int, ...]]:
    """Those that matter: a dimension of one value has any."""
    tensors = [results] if isinstance(results, Tensor) else list(results)
    return [
        tuple(s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1)
        for x in tensors
        if x.numel()
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_strides_and_types_are_torchs(shape: tuple[int, ...]) -> None:
    X = torch.randn(shape)
    for name, call in _calls(X):
        truth = call()
        with metalcore.overrides():
            found = call()
            assert ops_of(call), name
        assert type(found) is type(truth), name
        assert _strides(found) == _strides(truth), name


def test_every_override_of_linear_algebra_is_among_them() -> None:
    known = {name for shape in SHAPES for name, _ in _calls(torch.randn(shape))}
    assert {str(place) for place in _replace.PLACES["linalg"]} == known


def test_solutions_are_laid_out_as_right_sides(backend: Backend) -> None:
    A = (backend.randn(9, 5, 5) / 5 + 2 * torch.eye(5, device=backend.device)).tril()
    for k in (1, 3, 20):
        B = backend.randn(9, k, 5).mT
        for call in (
            lambda B: metalcore.solve(A, B),
            lambda B: metalcore.solve(A, B, refine=True),
            lambda B: metalcore.trsm(A, B),
            lambda B: metalcore.cholesky_solve(B, A),
        ):
            X, truth = call(B), call(B.contiguous())
            assert X.mT.is_contiguous()
            assert error(X, truth) <= tolerance("solve", torch.float32, 5)


def test_none_counts_as_absent_where_torch_takes_it() -> None:
    X = torch.randn(9, 4, 4)
    A = X @ X.mT + torch.eye(4)
    L = torch.linalg
    calls: list[Call] = [
        *(lambda: L.cholesky(A, out=None), lambda: L.cholesky_ex(A, out=None)),
        *(lambda: L.inv(A, out=None), lambda: L.solve(A, X, out=None), lambda: L.eigh(A, out=None)),
        *(lambda: L.qr(A, out=None), lambda: L.svd(A, driver=None), lambda: L.svd(A, out=None)),
        *(lambda: L.svdvals(A, driver=None), lambda: L.pinv(A, atol=None, rtol=None, out=None)),
        *(lambda: L.lstsq(A, X, driver=None), lambda: L.lstsq(A, X, rcond=None)),
        *(lambda: L.matrix_rank(A, atol=None, rtol=None), lambda: L.lu(A, out=None)),
        *(lambda: torch.cholesky_solve(X, A, out=None), lambda: L.det(A, out=None)),
        lambda: L.matrix_norm(A, 2, dtype=None),
    ]
    with metalcore.overrides():
        for call in calls:
            assert ops_of(call), call
        for refused in (lambda: L.cholesky(A, upper=None), lambda: L.inv(A, driver=None)):
            with pytest.raises(TypeError):
                refused()
