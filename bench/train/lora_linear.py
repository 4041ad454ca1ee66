# SPDX-License-Identifier: MIT
"""A linear layer [n, k] with an adapter of rank 16, for x [tokens, k]."""

import torch
import torch.nn.functional as F
from torch import Tensor

import metalcore

from ..harness import Bench

_RANK, _SCALE = 16, 2.0


def _inputs(tokens: int, k: int, n: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    x, weight, A = (torch.randn(rows, k, dtype=dtype) for rows in (tokens, n, _RANK))
    B = torch.randn(n, _RANK, dtype=dtype)
    return x, weight.mul_(k**-0.5), A.mul_(k**-0.5), B.mul_(_RANK**-0.5)


def _run(x: Tensor, weight: Tensor, A: Tensor, B: Tensor) -> Tensor:
    return metalcore.lora_linear(x, weight, A, B, scale=_SCALE)


def _torch(x: Tensor, weight: Tensor, A: Tensor, B: Tensor) -> Tensor:
    return F.linear(x, weight) + _SCALE * F.linear(F.linear(x, A), B)


BENCHES = tuple(
    Bench(
        op="train/lora_linear",
        run=_run,
        peers={"torch": _torch},
        inputs=_inputs,
        sweep=tuple(
            {"tokens": tokens, "k": k, "n": n}
            for tokens, k, n in ((1, 64, 64), (32, 512, 512), (256, 512, 1376))
        ),
        dtypes=(torch.float32, torch.bfloat16),
        truth=_torch,
        reduces_over=lambda x, weight, A, B: max(*x.shape, *weight.shape),
        # one product forward, two backward
        flops=lambda x, weight, A, B, products=products: (
            2 * products * x.shape[0] * (weight.numel() + A.numel() + B.numel())
        ),
        backward=backward,
    )
    for backward, products in ((False, 1), (True, 3))
)
