# SPDX-License-Identifier: MIT
"""Cross entropy of a linear layer: hidden [tokens, width], weight [classes, width]."""

import torch
import torch.nn.functional as F
from torch import Tensor

import metalcore

from ..harness import Bench


def _inputs(tokens: int, width: int, classes: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    hidden = torch.randn(tokens, width, dtype=dtype)
    weight = torch.randn(classes, width, dtype=dtype).mul_(width**-0.5)
    return hidden, weight, torch.randint(0, classes, (tokens,))


def _torch(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), target)


BENCHES = (
    Bench(
        op="train/linear_cross_entropy",
        run=metalcore.linear_cross_entropy,
        peers={"torch": _torch},
        inputs=_inputs,
        sweep=(
            {"tokens": 64, "width": 256, "classes": 1000},
            {"tokens": 512, "width": 512, "classes": 32000},
        ),
        dtypes=(torch.float32, torch.bfloat16),
        truth=_torch,
        reduces_over=lambda hidden, weight, target: max(*hidden.shape, *weight.shape),
        # three products: logits, dhidden and dweight
        flops=lambda hidden, weight, target: 6 * hidden.shape[0] * weight.numel(),
        backward=True,
        memory=True,
    ),
)
