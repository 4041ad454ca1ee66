# SPDX-License-Identifier: MIT
"""Jensen-Shannon divergence of log probabilities [rows, n]."""

import math

import torch
from torch import Tensor

import metalcore

from ..harness import Bench, nbytes


def _inputs(rows: int, n: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(torch.randn(rows, n).log_softmax(-1).to(dtype) for _ in range(2))


def _run(input: Tensor, target: Tensor) -> Tensor:
    return metalcore.jsd(input, target)


def _torch(input: Tensor, target: Tensor) -> Tensor:
    m = torch.logaddexp(input, target) - math.log(2.0)
    kl_div = torch.nn.functional.kl_div
    parts = [kl_div(m, x, reduction="batchmean", log_target=True) for x in (input, target)]
    return 0.5 * (parts[0] + parts[1])


BENCHES = tuple(
    Bench(
        op="train/jsd",
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
