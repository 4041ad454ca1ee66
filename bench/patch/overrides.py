# SPDX-License-Identifier: MIT
"""torch's functions as overrides leave them, against themselves."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import metalcore
from metalcore.patch import _replace
from metalcore.patch.overrides import GROUPS

from ..harness import Bench, Built

_PLACES = {str(place): place for group in GROUPS for place in _replace.PLACES[group]}
_FLOATS = (torch.float32, torch.bfloat16)
_LAPACK = (torch.float32, torch.float64)

SMALL = "small"
"""Calls that may be left to torch: what asking costs."""


def _benches(
    op: str,
    place: str,
    call: Callable[..., Any],
    inputs: Callable[..., Sequence[Tensor]],
    taken: Mapping[str, int],
    small: Mapping[str, int],
    dtypes: tuple[torch.dtype, ...],
    *,
    backward: bool = False,
    determined: Callable[..., Sequence[Tensor]] = lambda *results: results,
) -> list[Bench]:
    """`call(function, *inputs)` with the replacement and with what it replaces."""
    group = _PLACES[place].group
    original, replacement = _PLACES[place].pair()
    held = partial(_replace.as_if_held, group, replacement)
    shared: dict[str, Any] = {
        "op": f"patch/{op}",
        "peers": {"torch": partial(call, original)},
        "inputs": inputs,
        "truth": partial(call, original),
        "determined": determined,
        "reduces_over": lambda *xs: xs[0].shape[-1],
    }
    found = [Bench(run=partial(call, held), sweep=[taken], dtypes=dtypes, **shared)]
    if backward:
        shared_backward = {**shared, "determined": lambda *results: results, "backward": True}
        found.append(
            Bench(run=partial(call, held), sweep=[taken], dtypes=dtypes, **shared_backward)
        )
    small_calls = {"sweep": [small], "dtypes": dtypes[:1], "kind": SMALL}
    found.append(Bench(run=partial(call, held), **small_calls, **shared))
    return found


def _rows(rows: int, n: int, dtype: torch.dtype) -> tuple[Tensor]:
    return (torch.randn(rows, n, dtype=dtype),)


def _with_weight(rows: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, n, dtype=dtype), torch.randn(n, dtype=dtype)


def _logits(rows: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, n, dtype=dtype), torch.randint(n, (rows,))


def _bags(bags: int, size: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(10000, n, dtype=dtype), torch.randint(10000, (bags, size))


def _definite(batch: int, n: int, dtype: torch.dtype) -> tuple[Tensor]:
    X = torch.randn(batch, n, n, dtype=dtype)
    A = X @ X.mT / n + torch.eye(n, dtype=dtype)
    return (A if batch > 1 else A[0],)


def _systems(batch: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    (A,) = _definite(batch, n, dtype)
    return A, torch.randn_like(A)


_LARGE, _SMALL = {"rows": 1024, "n": 4096}, {"rows": 4, "n": 16}
_elementwise = [
    ("silu", "torch._C._nn.silu", lambda f, x: f(x)),
    ("gelu", "torch.nn.functional.gelu", lambda f, x: f(x, approximate="tanh")),
    ("softmax", "torch.softmax", lambda f, x: f(x, -1)),
]
_BATCH, _ONE = {"batch": 200, "n": 32}, {"batch": 1, "n": 8}
_decompositions: list[tuple[str, Any, Any]] = [
    ("cholesky", lambda f, A: f(A), lambda L: (L,)),
    ("qr", lambda f, A: f(A), lambda Q, R: (Q @ R, Q.mT @ Q)),
    ("svd", lambda f, A: f(A, full_matrices=False), lambda U, S, Vh: (S, U * S[..., None, :] @ Vh)),
    ("svdvals", lambda f, A: f(A), lambda S: (S,)),
    ("eigh", lambda f, A: f(A), lambda L, Q: (L, Q * L[..., None, :] @ Q.mT)),
    ("eigvalsh", lambda f, A: f(A), lambda L: (L,)),
    ("inv", lambda f, A: f(A), lambda X: (X,)),
    ("pinv", lambda f, A: f(A), lambda X: (X,)),
    ("lu", lambda f, A: f(A), lambda P, L, U: (P @ L @ U,)),
    ("det", lambda f, A: f(A), lambda d: (d,)),
    ("slogdet", lambda f, A: f(A), lambda sign, logabsdet: (sign, logabsdet)),
    ("matrix_norm", lambda f, A: f(A, "nuc"), lambda norm: (norm,)),
]


def _steps(overridden: bool) -> Built:
    """Steps of AdamW on copies of the parameters; the result is that of the first one."""

    def build(*inputs: Tensor) -> Callable[..., list[Tensor]]:
        params = [x.detach().clone().requires_grad_() for x in inputs]
        for p, x in zip(params, inputs, strict=True):
            p.grad = x.detach().flip(0)
        optimizer = torch.optim.AdamW(params)
        first: list[list[Tensor]] = []

        def step(*_: Tensor) -> list[Tensor]:
            if overridden:
                with metalcore.overrides(**{g: g == "optimizers" for g in GROUPS}):
                    optimizer.step()
            else:
                optimizer.step()
            if not first:
                first.append([p.detach().clone() for p in params])
            return first[0]

        return step

    return Built(build)


BENCHES = (
    *(
        bench
        for op, place, call in _elementwise
        for bench in _benches(op, place, call, _rows, _LARGE, _SMALL, _FLOATS, backward=True)
    ),
    *_benches(
        *("rms_norm", "torch.rms_norm", lambda f, x, w: f(x, x.shape[-1:], w, 1e-6)),
        *(_with_weight, _LARGE, {"rows": 1, "n": 16}, _FLOATS),
        backward=True,
    ),
    *_benches(
        *("layer_norm", "torch.layer_norm", lambda f, x, w: f(x, x.shape[-1:], w, w)),
        *(_with_weight, _LARGE, _SMALL, _FLOATS),
        backward=True,
    ),
    *_benches(
        *("cross_entropy", "torch._C._nn.cross_entropy_loss", lambda f, x, t: f(x, t, None, 1)),
        *(_logits, {"rows": 256, "n": 32000}, _SMALL, _FLOATS),
        backward=True,
    ),
    *_benches(
        *("embedding_bag", "torch.nn.functional.embedding_bag", lambda f, w, i: f(i, w)),
        *(_bags, {"bags": 1024, "size": 50, "n": 128}, {"bags": 2, "size": 2, "n": 16}, _FLOATS),
        backward=True,
    ),
    *(
        bench
        for op, call, determined in _decompositions
        for bench in _benches(
            *(op, f"torch.linalg.{op}", call, _definite, _BATCH, _ONE, _LAPACK),
            determined=determined,
        )
    ),
    *_benches(
        *("solve", "torch.linalg.solve", lambda f, A, B: f(A, B)),
        *(_systems, _BATCH, _ONE, _LAPACK),
    ),
    *_benches(
        *("solve_triangular", "torch.linalg.solve_triangular"),
        *(lambda f, A, B: f(A, B, upper=False), _systems, _BATCH, _ONE, _LAPACK),
    ),
    *_benches(
        *("cholesky_solve", "torch.cholesky_solve", lambda f, A, B: f(B, A)),
        *(_systems, _BATCH, _ONE, _LAPACK),
    ),
    *_benches(
        *("lstsq", "torch.linalg.lstsq", lambda f, A, B: f(A, B).solution),
        *(_systems, _BATCH, _ONE, _LAPACK),
    ),
    Bench(
        op="patch/adamw",
        run=_steps(True),
        peers={"torch": _steps(False)},
        inputs=lambda tensors, n, dtype: [torch.randn(n, n, dtype=dtype) for _ in range(tensors)],
        sweep=[{"tensors": 12, "n": 512}],
        dtypes=_LAPACK,
        truth=lambda *inputs: _steps(False).build(*inputs)(),
        reduces_over=lambda *inputs: 1,
    ),
)
