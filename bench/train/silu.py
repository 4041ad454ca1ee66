# SPDX-License-Identifier: MIT
"""SiLU, [rows, n]."""

import torch
from torch import Tensor

import metalcore

from ..harness import Bench, nbytes


def _inputs(rows: int, n: int, dtype: torch.dtype) -> tuple[Tensor]:
    return (torch.randn(rows, n, dtype=dtype),)


def _run(x: Tensor) -> Tensor:
    return metalcore.silu(x)


def _torch(x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x)


BENCHES = tuple(
    Bench(
        op="train/silu",
        run=_run,
        peers={"torch": _torch},
        inputs=_inputs,
        sweep=({"rows": 1, "n": 64}, {"rows": 32, "n": 1024}, {"rows": 1024, "n": 4096}),
        dtypes=(torch.float32, torch.bfloat16),
        truth=_torch,
        reduces_over=lambda *inputs: 1,
        # forward: one in, one out; backward: two in, one out
        bytes_moved=lambda x, *_, passes=passes: passes * nbytes(x),
        backward=backward,
    )
    for backward, passes in ((False, 2), (True, 5))
)
