# SPDX-License-Identifier: MIT
"""The accuracy contract: every decomposition, on every hard input, in every shape, by residuals.

All inputs of a shape go in as one batch, so that easy and hard matrices share their registers.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import metalcore
from metalcore._accuracy import tolerance
from tests.backends import Backend
from tests.linalg.inputs import MATRICES, POSITIVE, SYMMETRIC

Residuals = dict[str, Tensor]
FULL_RANK = {"random", "identity", "condition 1e4", "scaled by 1e-30", "scaled by 1e30"}
RANK_KNOWN = {*FULL_RANK, "zeros", "rank 1", "rank n/2", "one zero column"} - {"condition 1e4"}


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(x)


def _relative(x: Tensor, *scales: Tensor) -> Tensor:
    """||x|| over the sum of the scales; 0 / 0 is 0."""
    size, total = _norm(x), torch.stack([s.expand_as(_norm(x)) for s in scales]).sum(0)
    return torch.where(size == 0, size, size / total)


def _gram_error(Q: Tensor) -> Tensor:
    values = torch.linalg.eigvalsh(Q.mT @ Q) - 1
    return (
        torch.linalg.vector_norm(values, ord=float("inf"), dim=-1)
        if Q.shape[-1]
        else values.sum(-1)
    )


def _cholesky(A: Tensor) -> Residuals:
    L, D = metalcore.cholesky(A).double(), A.double()
    return {"A = L L^T": _relative(D - L @ L.mT, _norm(D)), "upper part": _norm(L.triu(1))}


def _lu(A: Tensor) -> Residuals:
    P, L, U = (x.double() for x in metalcore.lu(A))
    D = A.double()
    return {
        "A = P L U": _relative(D - P @ L @ U, _norm(D)),
        "pivoting": (L.abs() > 1 + 1e-6).sum((-1, -2)),
    }


def _qr(A: Tensor) -> Residuals:
    Q, R = (x.double() for x in metalcore.qr(A))
    return {
        "A = Q R": _relative(A.double() - Q @ R, _norm(A.double())),
        "Q^T Q = I": _gram_error(Q),
        "lower part": _norm(R.tril(-1)),
    }


def _qr_complete(A: Tensor) -> Residuals:
    Q, R = (x.double() for x in metalcore.qr(A, "complete"))
    return {
        "A = Q R": _relative(A.double() - Q @ R, _norm(A.double())),
        "Q^T Q = I": _gram_error(Q),
    }


def _eigh(A: Tensor) -> Residuals:
    L, Q = (x.double() for x in metalcore.eigh(A))
    D = A.double().tril() + A.double().tril(-1).mT
    return {
        "A Q = Q L": _relative(D @ Q - Q * L[..., None, :], _norm(D)),
        "Q^T Q = I": _gram_error(Q),
        "ascending": (L.diff(dim=-1) < 0).sum(-1),
        "values": _relative((L - torch.linalg.eigvalsh(D))[..., None], _norm(D)),
        "eigvalsh": _relative((metalcore.eigvalsh(A).double() - L)[..., None], _norm(D)),
    }


def _svd(A: Tensor) -> Residuals:
    U, S, V = (x.double() for x in metalcore.svd(A))
    D = A.double()
    return {
        "A = U S V^T": _relative(D - U * S[..., None, :] @ V.mT, _norm(D)),
        "U^T U = I": _gram_error(U),
        "V^T V = I": _gram_error(V),
        "descending": (S.diff(dim=-1) > 0).sum(-1),
        "not negative": (S < 0).sum(-1),
        "values": _relative((S - torch.linalg.svdvals(D))[..., None], _norm(D)),
        "svdvals": _relative((metalcore.svdvals(A).double() - S)[..., None], _norm(D)),
    }


def _solve(A: Tensor) -> Residuals:
    B = A.new_ones(*A.shape[:-1], 3).cumsum(-1)
    X, D = metalcore.solve(A, B).double(), A.double()
    backward = _relative(D @ X - B, _norm(D) * _norm(X), _norm(B.double()))
    refined = metalcore.solve(A, B, refine=True).double()
    return {
        "A X = B": backward,
        "refined": _relative(D @ refined - B, _norm(D) * _norm(refined), _norm(B.double())),
        "inv": _relative(metalcore.inv(A).double() @ D - torch.eye(D.shape[-1]), _condition(D)),
    }


def _condition(D: Tensor) -> Tensor:
    return torch.linalg.cond(D) * D.shape[-1]


def _trsm(A: Tensor) -> Residuals:
    n = A.shape[-1]
    largest = A.flatten(-2).abs().amax(-1)[..., None, None] if n else 1
    T, B = A.tril() + 2 * largest * torch.eye(n, dtype=A.dtype), A.new_ones(*A.shape[:-1], 3)
    found = {}
    for transpose in (False, True):
        X, D = metalcore.trsm(T, B, transpose=transpose).double(), T.double()
        D = D.mT if transpose else D
        found[f"transpose={transpose}"] = _relative(D @ X - B, _norm(D) * _norm(X))
    return found


def _lstsq(A: Tensor) -> Residuals:
    B = A.new_ones(*A.shape[:-1], 2).cumsum(-2)
    X, D = metalcore.lstsq(A, B).solution.double(), A.double()
    gradient = D.mT @ (D @ X - B)
    return {
        "A^T (A X - B) = 0": _relative(
            gradient, _norm(D) * (_norm(D) * _norm(X) + _norm(B.double()))
        )
    }


def _pinv(A: Tensor) -> Residuals:
    X, D = metalcore.pinv(A).double(), A.double()
    size = _norm(D) * _norm(X)
    return {
        "A X A = A": _relative(D @ X @ D - D, _norm(D) * size, _norm(D)),
        "X A X = X": _relative(X @ D @ X - X, _norm(X) * size, _norm(X)),
        "A X symmetric": _relative(D @ X - (D @ X).mT, size),
        "X A symmetric": _relative(X @ D - (X @ D).mT, size),
        "rank": metalcore.matrix_rank(A).double() - torch.linalg.matrix_rank(A),
    }


def _orthogonalize(A: Tensor) -> Residuals:
    Q = metalcore.orthogonalize(A).double()
    return {"orthonormal": _gram_error(Q if Q.shape[-2] >= Q.shape[-1] else Q.mT)}


def _polar(A: Tensor) -> Residuals:
    U, D = metalcore.polar(A).double(), A.double()
    tall = D.shape[-2] >= D.shape[-1]
    H = U.mT @ D if tall else D @ U.mT
    return {
        "orthonormal": _gram_error(U if tall else U.mT),
        "U^T A symmetric": _relative(H - H.mT, _norm(D)),
    }


class Contract(NamedTuple):
    """What a function must satisfy, on which inputs (all where none are named) and shapes."""

    residuals: Callable[[Tensor], Residuals]
    inputs: dict[str, Callable[..., Tensor]]
    square: bool
    only: set[str] | None = None


CONTRACTS = {
    "cholesky": Contract(_cholesky, POSITIVE, square=True),
    "lu": Contract(_lu, MATRICES, square=False),
    "qr": Contract(_qr, MATRICES, square=False),
    "qr complete": Contract(_qr_complete, MATRICES, square=False),
    "eigh": Contract(_eigh, SYMMETRIC, square=True),
    "svd": Contract(_svd, MATRICES, square=False),
    "solve": Contract(_solve, MATRICES, square=True, only=FULL_RANK),
    "trsm": Contract(_trsm, MATRICES, square=True, only=FULL_RANK | {"graded", "hilbert"}),
    "lstsq": Contract(_lstsq, MATRICES, square=False),
    "pinv": Contract(_pinv, MATRICES, square=False, only=RANK_KNOWN),
    "orthogonalize": Contract(_orthogonalize, MATRICES, square=False),
    "polar": Contract(_polar, MATRICES, square=False, only=FULL_RANK),
}
# what a formula over other ops is as accurate as
STANDS_ON = {
    "qr complete": "qr",
    "orthogonalize": "qr",
    "polar": "qr",
    "lstsq": "svd",
    "pinv": "svd",
}
SQUARE = [(1, 1), (5, 5), (16, 16), (33, 33)]
OTHERS = [(1, 7), (7, 1), (40, 12), (12, 40), (33, 17)]
# few inputs are enough for these, of which the last is one of a blocked program
LARGE = [(47, 47), (72, 72)]
LARGE_INPUTS = {"random", "rank n/2", "graded", "plus and minus lambda"}


def _cases(backend: Backend, contract: Contract) -> Iterator[tuple[list[str], Tensor]]:
    """Names of the inputs and the batch of them, for each shape."""
    names = [k for k in contract.inputs if contract.only is None or k in contract.only]
    for m, n in SQUARE + ([] if contract.square else OTHERS) + LARGE:
        some = [k for k in names if (m, n) not in LARGE or k in LARGE_INPUTS]
        size = (n,) if contract.inputs is not MATRICES else (m, n)
        yield some, torch.stack([contract.inputs[k](*size) for k in some])


def _check(name: str, names: list[str], A: Tensor, found: Residuals) -> None:
    allowed = tolerance(STANDS_ON.get(name, name), A.dtype, max(A.shape[-2:]))
    for what, residual in found.items():
        bad = [
            f"{k}: {r:.2g}"
            for k, r in zip(names, residual.tolist(), strict=True)
            if not r <= allowed
        ]
        assert not bad, f"{name} {list(A.shape)} {what}, allowed {allowed:.2g}: {', '.join(bad)}"


@pytest.mark.parametrize("name", CONTRACTS)
def test_residuals_on_every_hard_input(backend: Backend, name: str) -> None:
    contract = CONTRACTS[name]
    for dtype in (torch.float32, torch.float64):
        if dtype not in backend.dtypes:
            continue
        for names, exact in _cases(backend, contract):
            A = exact.to(backend.device, dtype)
            _check(name, names, A, contract.residuals(A))


@pytest.mark.parametrize("name", CONTRACTS)
def test_layouts_and_broadcast_batches(backend: Backend, name: str) -> None:
    contract = CONTRACTS[name]
    m, n = (6, 6) if contract.square else (6, 4)
    size = (n,) if contract.inputs is not MATRICES else (m, n)
    A = torch.stack([contract.inputs["random"](*size) for _ in range(3)]).float().to(backend.device)
    transposed = A.mT.contiguous().mT
    offset = torch.cat([A.new_zeros(1), A.flatten()])[1:].view(A.shape)
    broadcast = A[:1].expand(3, -1, -1)
    batched = A.unflatten(0, (1, 3))
    for view in (transposed, offset, broadcast, batched):
        _check(
            name,
            ["random"] * view.shape[:-2].numel(),
            view,
            {k: r.flatten() for k, r in contract.residuals(view).items()},
        )


def _outcome(function: Callable[..., Any], A: Tensor) -> str:
    """`raises`, `finite` or not."""
    try:
        outputs = function(A)
    except torch.linalg.LinAlgError:
        return "raises"
    values = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    return "finite" if all(v.isfinite().all() for v in values) else "not finite"


# what a NaN and an inf in one matrix of a batch lead to: as torch has it
OUTCOMES: dict[str, tuple[Callable[..., Any], str, str]] = {
    "cholesky": (metalcore.cholesky, "raises", "raises"),
    "qr": (metalcore.qr, "not finite", "not finite"),
    "eigh": (metalcore.eigh, "raises", "raises"),
    "eigvalsh": (metalcore.eigvalsh, "raises", "raises"),
    "svd": (metalcore.svd, "raises", "not finite"),
    "svdvals": (metalcore.svdvals, "raises", "not finite"),
    "inv": (metalcore.inv, "not finite", "finite"),
    "det": (metalcore.det, "not finite", "not finite"),
    "solve": (lambda A: metalcore.solve(A, A), "not finite", "not finite"),
}


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("name", OUTCOMES)
def test_nan_and_inf_stay_in_their_matrix(backend: Backend, name: str, value: float) -> None:
    function, of_nan, of_inf = OUTCOMES[name]
    expected = of_inf if value == float("inf") else of_nan
    for n in (3, 20):
        good = torch.stack([POSITIVE["random"](n) for _ in range(9)]).float()
        bad = good.clone()
        bad[4, n - 1, 0] = value
        assert _outcome(function, bad.to(backend.device)) == expected, n
        if expected != "raises":
            # the neighbours of a bad matrix are as good as without it
            for a, b in zip(_all(function(bad)), _all(function(good)), strict=True):
                keep = torch.arange(9) != 4
                torch.testing.assert_close(a[keep], b[keep], rtol=0, atol=0)


def _all(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


@pytest.mark.parametrize("name", [k for k in CONTRACTS if k not in {"qr complete", "polar"}])
@pytest.mark.parametrize("shape", [(0, 0), (0, 4, 4), (2, 0, 0)], ids=str)
def test_empty_input(backend: Backend, name: str, shape: tuple[int, ...]) -> None:
    found = CONTRACTS[name].residuals(torch.zeros(shape, device=backend.device) + 1)
    for residual in found.values():
        assert residual.shape == shape[:-2]
