# SPDX-License-Identifier: MIT
"""torch's function of attention as overrides replace it: [batch, heads, length, size], causal."""

import torch
import torch.nn.functional as F
from torch import Tensor

import metalcore

from ..harness import Bench


def _inputs(
    batch: int, heads: int, length: int, size: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    q, k, v = torch.randn(3, batch, heads, length, size, dtype=dtype)
    return q, k, v


def _torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return metalcore.scaled_dot_product_attention(q, k, v, is_causal=True)


BENCHES = tuple(
    Bench(
        op="attention/scaled_dot_product_attention",
        run=_ours,
        peers={"torch": _torch},
        inputs=_inputs,
        sweep=tuple({"batch": 1, "heads": 8, "length": n, "size": 64} for n in (64, 256, 1024)),
        dtypes=(torch.float32, torch.bfloat16),
        truth=_torch,
        reduces_over=lambda q, k, v: q.shape[-1] + k.shape[2],
        flops=lambda q, k, v: 2 * q.numel() * k.shape[2],
        backward=backward,
        plot_over="length",
    )
    for backward in (False, True)
)
