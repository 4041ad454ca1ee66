# SPDX-License-Identifier: MIT
"""torch.compile beside us: a small Llama plain, compiled, accelerated, and both.

A training step with its optimizer, and a forward pass. Two layers, so that all of it takes about
two minutes, most of them the compiler's.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

import metalcore

from ..harness import Bench, Built
from ._steps import Optimizer, accelerated, bench, llama, plain, training_steps

_WORDS, _LAYERS = 16000, 2

_llama = partial(llama, _WORDS, _LAYERS)


def _compiled(prepare: Optimizer) -> Optimizer:
    def prepared(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = prepare(model)
        model.compile(dynamic=False)
        return optimizer

    return prepared


def _forward(prepare: Callable[[nn.Module], object]) -> Built:
    """A forward pass of a fresh model, without a gradient."""

    def start(_: Tensor) -> Callable[[Tensor], Tensor]:
        model = _llama().eval()
        prepare(model)

        @torch.no_grad()
        def forward(tokens: Tensor) -> Tensor:
            logits: Tensor = model(tokens).logits
            return logits

        return forward

    return Built(start)


_TRAINING = bench(
    "program/compiled_step",
    "",
    _llama,
    training_steps(_llama, _compiled(accelerated)),
    {
        "torch": training_steps(_llama),
        "torch.compile": training_steps(_llama, _compiled(plain)),
        "accelerated": training_steps(_llama, accelerated),
    },
    batch=4,
    tokens=256,
    words=_WORDS,
    layers=_LAYERS,
)


def _both(model: nn.Module) -> None:
    metalcore.accelerate(model)
    model.compile(dynamic=False)


_FORWARD = replace(
    _TRAINING,
    kind="forward",
    run=_forward(_both),
    peers={
        "torch": _forward(lambda model: None),
        "torch.compile": _forward(lambda model: model.compile(dynamic=False)),
        "accelerated": _forward(metalcore.accelerate),
    },
    truth=lambda tokens: _forward(lambda model: None).build(tokens)(tokens),
)

BENCHES: tuple[Bench, ...] = tuple(
    replace(one, compiles=True, memory=False) for one in (_TRAINING, _FORWARD)
)
