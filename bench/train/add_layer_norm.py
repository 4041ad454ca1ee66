# SPDX-License-Identifier: MIT
"""Residual add and LayerNorm over the last dimension, [rows, n]."""

import torch
from torch import Tensor

import metalcore

from ..harness import Bench, nbytes


def _inputs(rows: int, n: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(torch.randn(s, dtype=dtype) for s in ((rows, n), (rows, n), n, n))


def _torch(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return torch.nn.functional.layer_norm(total, weight.shape, weight, bias), total


BENCHES = tuple(
    Bench(
        op="train/add_layer_norm",
        run=metalcore.add_layer_norm,
        peers={"torch": _torch},
        inputs=_inputs,
        sweep=tuple({"rows": r, "n": 4096} for r in (32, 1024)),
        dtypes=(torch.float32, torch.bfloat16),
        truth=_torch,
        reduces_over=lambda x, residual, weight, bias: max(x.shape),
        # forward: two in, two out; backward: dy, dsum and the sum in, one gradient out
        bytes_moved=lambda x, *_, passes=passes: passes * nbytes(x),
        backward=backward,
    )
    for backward, passes in ((False, 4), (True, 8))
)
