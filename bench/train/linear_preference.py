# SPDX-License-Identifier: MIT
"""ORPO of a linear layer: hidden [sequences, length, width], weight [classes, width]."""

import torch
import torch.nn.functional as F
from torch import Tensor

import metalcore

from ..harness import Bench


def _inputs(
    sequences: int, length: int, width: int, classes: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    hidden = torch.randn(sequences, length, width, dtype=dtype)
    weight = torch.randn(classes, width, dtype=dtype).mul_(width**-0.5)
    return hidden, weight, torch.randint(0, classes, (sequences, length))


def _torch(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    log_p = F.linear(hidden, weight).log_softmax(-1).gather(-1, target[..., None])[..., 0]
    mean = log_p.mean(-1)
    log_odds = mean - torch.log(-torch.expm1(mean))
    chosen, rejected = log_odds.chunk(2)
    return -log_p.chunk(2)[0].mean() - 0.1 * F.logsigmoid(chosen - rejected).mean()


BENCHES = (
    Bench(
        op="train/linear_preference",
        run=metalcore.linear_orpo,
        peers={"torch": _torch},
        inputs=_inputs,
        sweep=({"sequences": 4, "length": 64, "width": 256, "classes": 8000},),
        dtypes=(torch.float32,),
        truth=_torch,
        reduces_over=lambda hidden, weight, target: max(weight.shape),
        # the logits twice, dhidden and dweight
        flops=lambda hidden, weight, target: 8 * target.numel() * weight.numel(),
        backward=True,
    ),
)
