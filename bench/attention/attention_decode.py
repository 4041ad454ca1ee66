# SPDX-License-Identifier: MIT
"""One query of each of the heads over a cache of `length` keys, heads of 128."""

import torch
import torch.nn.functional as F
from torch import Tensor

import metalcore

from ..harness import Bench, nbytes
from .attention import by_mlx


def _inputs(heads: int, key_heads: int, length: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    q = torch.randn(1, heads, 1, 128, dtype=dtype)
    k, v = (torch.randn(1, key_heads, length, 128, dtype=dtype) for _ in range(2))
    return q, k, v


def _torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


_BENCH = Bench(
    op="attention/attention_decode",
    run=metalcore.attention_decode,
    peers={"torch": _torch, "mlx": by_mlx()},
    inputs=_inputs,
    sweep=tuple(
        {"heads": 32, "key_heads": h, "length": n} for h in (32, 8) for n in (512, 2048, 8192)
    ),
    dtypes=(torch.float32, torch.bfloat16),
    truth=_torch,
    reduces_over=lambda q, k, v: k.shape[2],
    bytes_moved=lambda q, k, v: nbytes(q, k, v, q),
    plot_over="length",
)
BENCHES = (_BENCH,)
