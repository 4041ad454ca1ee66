# SPDX-License-Identifier: MIT
"""What ring_attention does in each process, alone in its ring: [batch, heads, length, size]."""

import tempfile

import torch
import torch.distributed as dist
from torch import Tensor

import metalcore

from ..harness import Bench, nbytes


def _run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if not dist.is_initialized():
        folder = tempfile.mkdtemp()
        dist.init_process_group("gloo", f"file://{folder}/meet", rank=0, world_size=1)
    return metalcore.ring_attention(q, k, v, causal=True)


def _truth(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


BENCHES = (
    Bench(
        op="attention/ring_attention",
        plot_over="length",
        run=_run,
        peers={"torch": _truth},
        inputs=lambda length, dtype: tuple(torch.randn(3, 1, 8, length, 64, dtype=dtype)),
        sweep=tuple({"length": n} for n in (128, 1024)),
        dtypes=(torch.float32, torch.bfloat16),
        truth=_truth,
        reduces_over=lambda q, k, v: q.shape[2],
        bytes_moved=lambda q, k, v: 2 * nbytes(q),
        flops=lambda q, k, v: 2 * q.numel() * q.shape[2],
    ),
)
