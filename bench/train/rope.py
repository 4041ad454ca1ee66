# SPDX-License-Identifier: MIT
"""Rotary position embedding of queries [1, heads, length, size] and as many keys. The gradient is
the same kernel."""

from typing import Any

import torch
from torch import Tensor

import metalcore
from metalcore._op import Op

from ..harness import Bench, Built, nbytes


def _inputs(heads: int, length: int, size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    q, k = (torch.randn(1, heads, length, size, dtype=dtype) for _ in range(2))
    cos, sin = metalcore.RotaryEmbedding(size)(q, torch.arange(length, device=q.device)[None])
    return q, k, cos, sin


def _llama(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    from transformers.models.llama import modeling_llama  # type: ignore[import-not-found, unused-ignore]

    return modeling_llama.apply_rotary_pos_emb


def _torch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """The same in torch: halves are multiplied and joined."""

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    return rotate(q), rotate(k)


def _run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return metalcore.apply_rotary_pos_emb(q, k, cos, sin)


def _truth(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return Op.all["rope"].meaning(q, k, cos, sin, None, 1, q.shape[-1], False, False)


BENCHES = (
    Bench(
        op="train/rope",
        run=_run,
        peers={"torch": _torch, "transformers": Built(_llama)},
        inputs=_inputs,
        sweep=tuple(
            {"heads": heads, "length": length, "size": size}
            for heads, length, size in ((8, 1, 64), (32, 1, 128), (32, 128, 128), (32, 2048, 128))
        ),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        truth=_truth,
        reduces_over=lambda *inputs: 2,
        bytes_moved=lambda q, k, cos, sin: 2 * nbytes(q, k) + nbytes(cos, sin),
        compiled_at={"heads": 32, "length": 2048, "size": 128},
    ),
)
