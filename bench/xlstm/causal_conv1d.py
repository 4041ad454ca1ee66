# SPDX-License-Identifier: MIT
"""Causal convolution with four weights per channel and SiLU, [1, length, channels]."""

import torch
import torch.nn.functional as F
from torch import Tensor

import metalcore

from ..harness import Bench, nbytes


def _inputs(length: int, channels: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    x, weight = torch.randn(1, length, channels), torch.randn(channels, 1, 4)
    return x.to(dtype), weight.to(dtype), torch.randn(channels).to(dtype)


def _ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return metalcore.causal_conv1d(x, weight, bias, activation="silu")


def _torch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = F.conv1d(x.mT, weight, bias, padding=3, groups=len(bias))
    return F.silu(y[..., : x.shape[1]].mT)


_BENCH = Bench(
    op="xlstm/causal_conv1d",
    run=_ours,
    peers={"torch": _torch},
    inputs=_inputs,
    sweep=tuple({"length": n, "channels": 2048} for n in (256, 1024, 4096)),
    dtypes=(torch.float32, torch.bfloat16),
    truth=_torch,
    reduces_over=lambda x, weight, bias: 4,
    bytes_moved=lambda x, weight, bias: nbytes(x, x, weight, bias),
    plot_over="length",
)
BENCHES = (_BENCH,)
