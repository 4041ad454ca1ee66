# SPDX-License-Identifier: MIT
"""torch.compile beside us: a small Llama plain, compiled, accelerated, and both.

A training step with its optimizer, and a forward pass without gradients. Two layers, so that all
of it takes a few minutes, most of them the compiler's.
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


Mode = type[torch.no_grad] | type[torch.inference_mode]


def _forward(mode: Mode, prepare: Callable[[nn.Module], object]) -> Built:
    """A forward pass of a fresh model."""

    def start(_: Tensor) -> Callable[[Tensor], Tensor]:
        model = _llama().eval()
        prepare(model)

        def forward(tokens: Tensor) -> Tensor:
            with mode():
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


def _compile(model: nn.Module) -> None:
    model.compile(dynamic=False)


def _both(model: nn.Module) -> None:
    metalcore.accelerate(model)
    _compile(model)


def _without_gradient(kind: str, mode: Mode) -> Bench:
    plain = _forward(mode, lambda model: None)
    return replace(
        _TRAINING,
        kind=kind,
        run=_forward(mode, _both),
        peers={
            "torch": plain,
            "torch.compile": _forward(mode, _compile),
            "accelerated": _forward(mode, metalcore.accelerate),
        },
        # of one token, calls take longer than what they compute
        sweep=({"batch": 1, "tokens": 1}, *_TRAINING.sweep),
        truth=lambda tokens: plain.build(tokens)(tokens),
    )


_FORWARD = (
    _without_gradient("forward", torch.no_grad),
    _without_gradient("forward, inference_mode", torch.inference_mode),
)

BENCHES: tuple[Bench, ...] = tuple(
    replace(one, compiles=True, memory=False) for one in (_TRAINING, *_FORWARD)
)
