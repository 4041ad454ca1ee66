# SPDX-License-Identifier: MIT
"""LayerNorm over the last dimension, [rows, n]."""

import torch
from torch import Tensor

import metalcore

from ..harness import Bench, nbytes


def _inputs(rows: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias = (torch.randn(s, dtype=dtype) for s in ((rows, n), n, n))
    return x, weight, bias


def _run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return metalcore.layer_norm(x, weight.shape, weight, bias)


def _torch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias)


BENCHES = tuple(
    Bench(
        op="train/layer_norm",
        run=_run,
        peers={"torch": _torch},
        inputs=_inputs,
        sweep=tuple({"rows": r, "n": n} for r, n in ((1, 64), (32, 1024), (1024, 4096))),
        dtypes=(torch.float32, torch.bfloat16),
        truth=_torch,
        reduces_over=lambda x, weight, bias: max(x.shape),
        # forward: x in, y out, weights once; backward: x and dy in, dx out, weights and gradients
        bytes_moved=lambda x, weight, bias, xs=xs, weights=weights: (
            xs * nbytes(x) + weights * nbytes(weight)
        ),
        backward=backward,
        compiled_at={"rows": 1024, "n": 4096},
    )
    for backward, xs, weights in ((False, 2, 2), (True, 5, 5))
)
