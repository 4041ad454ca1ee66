# SPDX-License-Identifier: MIT
"""Training steps of a language model of transformers, [batch, tokens]."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import metalcore

from ..harness import Bench, Built

Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def accelerated(model: nn.Module) -> torch.optim.Optimizer:
    metalcore.accelerate(model)
    return metalcore.MetalAdamW(model.parameters(), lr=1e-4)


def language_model(family: str, **sizes: Any) -> nn.Module:
    """A model with random weights, always the same ones; nothing is downloaded."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    build: Any = AutoModelForCausalLM.from_config
    model: nn.Module = build(AutoConfig.for_model(family, **sizes))
    return model


def llama(words: int, layers: int, width: int = 512) -> nn.Module:
    """With heads of 64."""
    heads = width // 64
    return language_model(
        "llama",
        vocab_size=words,
        hidden_size=width,
        intermediate_size=width * 43 // 16,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        use_cache=False,
    )


def training_steps(
    build: Callable[[], nn.Module],
    prepare: Optimizer = plain,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Built:
    """Steps of a fresh model; the result is loss and gradients of the first one."""

    def start(_: Tensor) -> Callable[[Tensor], list[Tensor]]:
        model = build()
        optimizer = prepare(model)
        first: list[list[Tensor]] = []

        def step(tokens: Tensor) -> list[Tensor]:
            with around():
                loss = model(tokens, labels=tokens).loss
                loss.backward()
                if not first:
                    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
                    first.append([loss.detach(), *grads])
                optimizer.step()
            # nothing but weights and moments stays, so that the memory of a step is all it takes
            optimizer.zero_grad()
            return first[0]

        return step

    return Built(start)


def bench(
    op: str,
    kind: str,
    build: Callable[[], nn.Module],
    run: Built,
    peers: Mapping[str, Built],
    *,
    batch: int,
    tokens: int,
    words: int,
    layers: int,
) -> Bench:
    """`run` against `peers`, in time and memory. Loss and gradients have to be the plain model's:
    experts do not compute in float64."""
    return Bench(
        op=op,
        kind=kind,
        run=run,
        peers=peers,
        inputs=lambda batch, tokens, dtype: [torch.randint(0, words, (batch, tokens))],
        sweep=[{"batch": batch, "tokens": tokens}],
        dtypes=[torch.float32],
        truth=lambda x: training_steps(build).build(x)(x),
        # a gradient of the first layer passed every layer twice, a sum over all tokens each time
        reduces_over=lambda x: x.numel() * (2 * layers) ** 2,
        memory=True,
    )
