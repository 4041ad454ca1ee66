# SPDX-License-Identifier: MIT
"""The MLP block of a Llama layer, for x [tokens, width], with and without adapters of rank 16."""

import torch
import torch.nn.functional as F
from torch import Tensor

import metalcore

from ..harness import Bench

_RANK, _EPS = 16, 1e-6


def _inputs(tokens: int, width: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    weights = ((hidden, width), (hidden, width), (width, hidden))
    made = (torch.randn(s, dtype=dtype).mul_(s[1] ** -0.5) for s in weights)
    return torch.randn(tokens, width, dtype=dtype), torch.ones(width, dtype=dtype), *made


def _adapted(tokens: int, width: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    shapes = ((_RANK, width), (hidden, _RANK)) * 2 + ((_RANK, hidden), (width, _RANK))
    adapters = (torch.randn(s, dtype=dtype).mul_(s[1] ** -0.5) for s in shapes)
    return *_inputs(tokens, width, hidden, dtype), *adapters


def _run(x: Tensor, norm: Tensor, *weights: Tensor) -> Tensor:
    return metalcore.fused_swiglu_mlp(x, *weights, rms_weight=norm, rms_eps=_EPS)


def _torch(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, *ab: Tensor) -> Tensor:
    def linear(x: Tensor, weight: Tensor, *pair: Tensor) -> Tensor:
        y = F.linear(x, weight)
        return y + F.linear(F.linear(x, pair[0]), pair[1]) if pair else y

    n = F.rms_norm(x, norm.shape, norm, _EPS)
    product = F.silu(linear(n, gate, *ab[:2])) * linear(n, up, *ab[2:4])
    return x + linear(product, down, *ab[4:])


BENCHES = tuple(
    Bench(
        op="train/fused_swiglu_mlp",
        kind=kind,
        run=_run,
        peers={"torch": _torch},
        inputs=inputs,
        sweep=tuple(
            {"tokens": tokens, "width": width, "hidden": hidden}
            for tokens, width, hidden in ((32, 256, 704), (256, 512, 1376))
        ),
        dtypes=(torch.float32, torch.bfloat16),
        truth=_torch,
        reduces_over=lambda x, *rest: max(max(t.shape) for t in (x, *rest)),
        # one product forward, two backward
        flops=lambda x, norm, *weights, products=products: (
            2 * products * x.shape[0] * sum(w.numel() for w in weights)
        ),
        backward=backward,
    )
    for kind, inputs in (("", _inputs), ("adapters", _adapted))
    for backward, products in ((False, 1), (True, 3))
)
