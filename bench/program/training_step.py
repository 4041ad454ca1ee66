# SPDX-License-Identifier: MIT
"""A training step of a Llama of 58 million parameters: plain, and accelerated with MetalAdamW."""

from functools import partial

import torch
from torch import nn

from ._steps import accelerated, bench, llama, training_steps

_WORDS, _LAYERS = 32000, 8

_llama = partial(llama, _WORDS, _LAYERS)


def _fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


BENCHES = (
    bench(
        "program/training_step",
        "",
        _llama,
        training_steps(_llama, accelerated),
        {"torch": training_steps(_llama), "torch fused": training_steps(_llama, _fused)},
        batch=4,
        tokens=256,
        words=_WORDS,
        layers=_LAYERS,
    ),
)
