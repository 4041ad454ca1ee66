# SPDX-License-Identifier: MIT
"""Batched linear algebra and rows on MLX arrays, by metalcore and by MLX itself, on the CPU."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..harness import Bench, Built

MATRICES = ({"batch": 1000, "n": 4}, {"batch": 1000, "n": 8}, {"batch": 100, "n": 32})
ROWS = ({"rows": 64, "n": 1024}, {"rows": 1024, "n": 4096})


def on_arrays(function: Callable[[Any], Callable[..., Any]]) -> Built:
    """`function(metalcore.mlx or mlx.core)` on arrays, which are made before and evaluated."""

    def build(*tensors: Tensor) -> Callable[..., list[Tensor]]:
        import mlx.core as mx

        import metalcore.mlx

        mx.set_default_device(mx.cpu)
        arrays = [metalcore.mlx.from_torch(t) for t in tensors]
        call = function({"ours": metalcore.mlx, "theirs": mx})

        def run(*_: Tensor) -> list[Tensor]:
            found = call(*arrays)
            results = list(found) if isinstance(found, (tuple, list)) else [found]
            mx.eval(results)
            return [metalcore.mlx.to_torch(r) for r in results]

        return run

    return Built(build)


def _bench(
    name: str, ours: Callable[..., Any], theirs: Callable[..., Any], inputs: Callable[..., Any],
    sweep: Sequence[dict[str, int]], **more: Any,
) -> Bench:  # fmt: skip
    return Bench(
        op=f"mlx/{name}",
        run=on_arrays(lambda of: lambda *a: ours(of["ours"], *a)),
        peers={"mlx": on_arrays(lambda of: lambda *a: theirs(of["theirs"], *a))},
        inputs=inputs,
        sweep=sweep,
        dtypes=(torch.float32,),
        reduces_over=lambda x, *_: x.shape[-1],
        **more,
    )


def _general(batch: int, n: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(batch, n, n, dtype=dtype)]


def _positive(batch: int, n: int, dtype: torch.dtype) -> list[Tensor]:
    (A,) = _general(batch, n, dtype)
    return [A @ A.mT / n + torch.eye(n, dtype=dtype)]


def _rows(rows: int, n: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(rows, n, dtype=dtype), torch.ones(n, dtype=dtype)]


BENCHES = [
    _bench(
        "qr", lambda ours, A: ours.qr(A), lambda mx, A: mx.linalg.qr(A, stream=mx.cpu),
        _general, MATRICES, truth=torch.linalg.qr, determined=lambda Q, R: [Q @ R],
    ),
    _bench(
        "cholesky", lambda ours, A: ours.cholesky(A),
        lambda mx, A: mx.linalg.cholesky(A, stream=mx.cpu),
        _positive, MATRICES, truth=torch.linalg.cholesky,
    ),
    _bench(
        "eigh", lambda ours, A: ours.eigvalsh(A),
        lambda mx, A: mx.linalg.eigvalsh(A, stream=mx.cpu),
        _positive, MATRICES, truth=torch.linalg.eigvalsh,
    ),
    _bench(
        "svd", lambda ours, A: ours.svd(A)[1], lambda mx, A: mx.linalg.svd(A, stream=mx.cpu)[1],
        _general, MATRICES, truth=torch.linalg.svdvals,
    ),
    _bench(
        "solve", lambda ours, A: ours.inv(A), lambda mx, A: mx.linalg.inv(A, stream=mx.cpu),
        _positive, MATRICES, truth=torch.linalg.inv,
    ),
    _bench(
        "rms_norm", lambda ours, x, w: ours.rms_norm(x, w, 1e-6),
        lambda mx, x, w: mx.fast.rms_norm(x, w, 1e-6),
        _rows, ROWS, truth=lambda x, w: torch.rms_norm(x, x.shape[-1:], w, 1e-6),
    ),
    _bench(
        "softmax", lambda ours, x, w: ours.softmax(x), lambda mx, x, w: mx.softmax(x, -1),
        _rows, ROWS, truth=lambda x, w: x.softmax(-1),
    ),
]  # fmt: skip
