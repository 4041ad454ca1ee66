# SPDX-License-Identifier: MIT
"""Softmax over the last dimension, [rows, n]."""

import torch
from torch import Tensor

import metalcore

from ..harness import Bench, nbytes


def _inputs(rows: int, n: int, dtype: torch.dtype) -> tuple[Tensor]:
    return (torch.randn(rows, n, dtype=dtype),)


def _torch(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


BENCHES = tuple(
    Bench(
        op="train/softmax",
        run=metalcore.softmax,
        peers={"torch": _torch},
        inputs=_inputs,
        sweep=tuple({"rows": r, "n": n} for r, n in ((1, 64), (32, 1024), (1024, 4096))),
        dtypes=(torch.float32, torch.bfloat16),
        truth=_torch,
        reduces_over=lambda x: x.shape[-1],
        # forward: one in, one out; backward: two in, one out
        bytes_moved=lambda x, passes=passes: passes * nbytes(x),
        backward=backward,
        compiled_at={"rows": 1024, "n": 4096},
    )
    for backward, passes in ((False, 2), (True, 5))
)
