# SPDX-License-Identifier: MIT
"""Divergences of log probabilities [rows, n]."""

import torch
from torch import Tensor

from ..harness import Bench, Function, nbytes


def _inputs(rows: int, n: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(torch.randn(rows, n).log_softmax(-1).to(dtype) for _ in range(2))


def divergence(op: str, run: Function, plain: Function) -> tuple[Bench, ...]:
    """`run` against the same in torch, forward and with gradients."""
    return tuple(
        Bench(
            op=op,
            run=run,
            peers={"torch": plain},
            inputs=_inputs,
            sweep=({"rows": 2, "n": 1000}, {"rows": 64, "n": 32000}),
            dtypes=(torch.float32, torch.bfloat16),
            truth=plain,
            reduces_over=lambda input, target: input.numel(),
            # forward: two in; backward: two in, two out
            bytes_moved=lambda input, target, passes=passes: passes * nbytes(input),
            backward=backward,
        )
        for backward, passes in ((False, 2), (True, 6))
    )
