# SPDX-License-Identifier: MIT
"""GEGLU by tanh, [rows, n]."""

import torch
from torch import Tensor

import metalcore

from ..harness import Bench, nbytes


def _inputs(rows: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, n, dtype=dtype), torch.randn(rows, n, dtype=dtype)


def _run(gate: Tensor, up: Tensor) -> Tensor:
    return metalcore.geglu(gate, up, "tanh")


def _torch(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


BENCHES = tuple(
    Bench(
        op="train/geglu",
        run=_run,
        peers={"torch": _torch},
        inputs=_inputs,
        sweep=({"rows": 1, "n": 64}, {"rows": 32, "n": 1024}, {"rows": 1024, "n": 11008}),
        dtypes=(torch.float32, torch.bfloat16),
        truth=_torch,
        reduces_over=lambda *inputs: 1,
        # forward: two in, one out; backward: three in, two out
        bytes_moved=lambda x, *_, passes=passes: passes * nbytes(x),
        backward=backward,
        compiled_at={"rows": 1024, "n": 11008},
    )
    for backward, passes in ((False, 3), (True, 8))
)
