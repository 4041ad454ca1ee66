# SPDX-License-Identifier: MIT
"""Kullback-Leibler divergence of log probabilities [rows, n]."""

import torch
from torch import Tensor

import metalcore

from ..harness import Bench, nbytes


def _inputs(rows: int, n: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(torch.randn(rows, n).log_softmax(-1).to(dtype) for _ in range(2))


def _run(input: Tensor, target: Tensor) -> Tensor:
    return metalcore.kl_div(input, target, "batchmean", log_target=True)


def _torch(input: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.kl_div(input, target, reduction="batchmean", log_target=True)


BENCHES = tuple(
    Bench(
        op="train/kl_div",
        run=_run,
        peers={"torch": _torch},
        inputs=_inputs,
        sweep=({"rows": 2, "n": 1000}, {"rows": 64, "n": 32000}),
        dtypes=(torch.float32, torch.bfloat16),
        truth=_torch,
        reduces_over=lambda input, target: input.numel(),
        # forward: two in; backward: two in, two out
        bytes_moved=lambda input, target, passes=passes: passes * nbytes(input),
        backward=backward,
    )
    for backward, passes in ((False, 2), (True, 6))
)
