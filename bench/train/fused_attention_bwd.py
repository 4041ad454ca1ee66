# SPDX-License-Identifier: MIT
"""The way back from attention to hidden states [1, length, heads * 64], and to all weights."""

import torch
from torch import Tensor

import metalcore

from ..harness import Bench

_SIZE, _EPS = 64, 1e-6


def _inputs(length: int, heads: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    width = heads * _SIZE
    grads = (torch.randn(1, length, heads, _SIZE, dtype=dtype) for _ in range(3))
    weights = (torch.randn(width, width, dtype=dtype).mul_(width**-0.5) for _ in range(3))
    cos, sin = metalcore.RotaryEmbedding(_SIZE)(position_ids=torch.arange(length))
    x = torch.randn(1, length, width, dtype=dtype)
    norm = torch.ones(width, dtype=dtype)
    n = torch.nn.functional.rms_norm(x, norm.shape, norm, _EPS)
    rstd = torch.rsqrt(x.double().square().mean(-1) + _EPS)
    rstd = rstd.to(torch.promote_types(dtype, torch.float32))
    return *grads, cos.to(dtype), sin.to(dtype), n, *weights, x, norm, rstd


def _run(*inputs: Tensor) -> tuple[Tensor | None, ...]:
    *before, x, norm, rstd = inputs
    found = metalcore.fused_attention_bwd(*before, *(None,) * 6, 1.0, x, norm, rstd)
    return *found[:4], found[-1]


def _torch(
    d_q: Tensor,
    d_k: Tensor,
    d_v: Tensor,
    cos: Tensor,
    sin: Tensor,
    n: Tensor,
    W_q: Tensor,
    W_k: Tensor,
    W_v: Tensor,
    x: Tensor,
    norm: Tensor,
    rstd: Tensor,
) -> tuple[Tensor, ...]:
    """The same formulas, one function of torch at a time."""

    def rotate_back(d: Tensor) -> Tensor:
        a, b = (d * sin[:, None]).chunk(2, -1)
        return d * cos[:, None] + torch.cat((b, -a), -1)

    grads = [d.flatten(2) for d in (rotate_back(d_q), rotate_back(d_k), d_v)]
    dn = grads[0] @ W_q + grads[1] @ W_k + grads[2] @ W_v
    dweights = [d[0].T @ n[0] for d in grads]
    normed, scaled = x * rstd[..., None], dn * norm
    dx = (scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * rstd[..., None]
    return dx.to(x.dtype), *dweights, (dn * normed).sum((0, 1)).to(norm.dtype)


BENCHES = (
    Bench(
        op="train/fused_attention_bwd",
        run=_run,
        peers={"torch": _torch},
        inputs=_inputs,
        sweep=({"length": 32, "heads": 4}, {"length": 256, "heads": 8}),
        dtypes=(torch.float32, torch.bfloat16),
        truth=_torch,
        reduces_over=lambda *inputs: 3 * max(inputs[-3].shape),
        # two products for each of q, k and v
        flops=lambda *inputs: 12 * inputs[-3].shape[1] * inputs[6].numel(),
    ),
)
