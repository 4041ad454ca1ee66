# SPDX-License-Identifier: MIT
"""Residual add and RMSNorm over the last dimension, [rows, n]."""

import torch
from torch import Tensor

import metalcore
from metalcore._op import Op

from ..harness import Bench, nbytes

_EPS = 1e-6


def _inputs(rows: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x, residual = torch.randn(rows, n, dtype=dtype), torch.randn(rows, n, dtype=dtype)
    return x, residual, torch.randn(n, dtype=dtype)


def _run(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return metalcore.add_rms_norm(x, residual, weight, _EPS)


def _torch(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return torch.nn.functional.rms_norm(total, weight.shape, weight, _EPS), total


def _truth(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y, total, _ = Op.all["add_rms_norm"].meaning(x, residual, weight, _EPS, 0.0)
    return y, total


BENCHES = tuple(
    Bench(
        op="train/add_rms_norm",
        run=_run,
        peers={"torch": _torch},
        inputs=_inputs,
        sweep=({"rows": 32, "n": 4096}, {"rows": 1024, "n": 4096}, {"rows": 4096, "n": 4096}),
        dtypes=(torch.float32, torch.bfloat16),
        truth=_truth,
        reduces_over=lambda x, residual, weight: max(x.shape),
        # forward: two in, two out; backward: dy, dsum and the sum in, one gradient out
        bytes_moved=lambda x, residual, weight, passes=passes: passes * nbytes(x),
        backward=backward,
        compiled_at={"rows": 1024, "n": 4096},
    )
    for backward, passes in ((False, 4), (True, 8))
)
