# SPDX-License-Identifier: MIT
"""A block mask of a causal window over [1, heads, length, 64]; torch has it compiled, forward."""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torchs

import metalcore

from ..harness import Bench, Built, Function

_WINDOW = 256


def _inputs(heads: int, length: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    q, k, v = torch.randn(3, 1, heads, length, 64, dtype=dtype)
    return q, k, v


def _mask(q: Tensor) -> BlockMask:
    n = q.shape[2]
    device = q.device.type

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < _WINDOW)

    return create_block_mask(seen, None, None, n, n, device=device)


def _built(function: Function) -> Built:
    def build(q: Tensor, k: Tensor, v: Tensor) -> Function:
        mask = _mask(q)
        return lambda q, k, v: function(q, k, v, block_mask=mask)

    return Built(build)


def _truth(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    seen = (distance >= 0) & (distance < _WINDOW)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, seen)


BENCHES = (
    Bench(
        op="attention/flex_attention",
        run=_built(metalcore.attn.flex_attention),
        peers={"FlexAttention, compiled": _built(torch.compile(torchs)), "torch": _truth},
        inputs=_inputs,
        sweep=({"heads": 8, "length": 1024},),
        dtypes=(torch.float32,),
        truth=_truth,
        reduces_over=lambda q, k, v: q.shape[-1] + k.shape[2],
    ),
)
