# SPDX-License-Identifier: MIT
"""The step of a token of a made Llama, after a prompt: [tokens] ids in, [1, vocabulary] out."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import metalcore

from ..harness import Built

_WORDS = 32000


@cache
def made(width: int, layers: int, scheme: str) -> Any:
    """A Llama with random weights, those of linear layers packed as `scheme` where it is given.

    Rows repeat after 64 of them, so that it takes no minutes to pack.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = max(4, width // 64)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        vocab_size=_WORDS,
        max_position_embeddings=4096,
    )
    with torch.device("meta" if scheme else "cpu"):
        model = LlamaForCausalLM(config).eval()
    if scheme:
        _pack(model, scheme)
        rotary: Any = model.model.rotary_emb
        model.model.rotary_emb = type(rotary)(config)
    return model


def _pack(model: nn.Module, scheme: str) -> None:
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            rows = torch.randn(64, module.in_features) * module.in_features**-0.5
            blocks = metalcore.quantize_ggml(rows, scheme)
            whole = blocks.repeat(-(-module.out_features // 64), 1)[: module.out_features]
            parent, _, own = name.rpartition(".")
            packed = metalcore.GGMLLinear.from_blocks(whole.contiguous(), scheme)
            setattr(model.get_submodule(parent), own, packed)
        elif list(module.parameters(recurse=False)):
            shape = module.weight.shape  # type: ignore[union-attr]
            values = torch.randn(shape) if len(shape) == 2 else torch.ones(shape)  # type: ignore[arg-type,operator]
            module.weight = nn.Parameter(values, requires_grad=False)


Build = Callable[[], Any]


def by_transformers(build: Build) -> Built:
    def start(prompt: Tensor) -> Callable[[Tensor], Tensor]:
        from transformers import DynamicCache

        return _steps(build(), DynamicCache(), prompt)

    return Built(start)


def by_tape(build: Build) -> Built:
    def start(prompt: Tensor) -> Callable[[Tensor], Tensor]:
        model = build()
        decoder = metalcore.decoder(model)
        assert decoder.is_recorded, decoder.why_not
        step = _steps(model, decoder.cache(), prompt)

        def run(x: Tensor) -> Tensor:
            with decoder:
                return step(x)

        return run

    return Built(start)


def _steps(model: Any, kept: Any, prompt: Tensor) -> Callable[[Tensor], Tensor]:
    """The step after a prompt, again and again."""
    with torch.inference_mode():
        model(input_ids=prompt[None], past_key_values=kept)

    def step(_: Tensor) -> Tensor:
        with torch.inference_mode():
            token = torch.tensor([[7]])
            logits: Tensor = model(input_ids=token, past_key_values=kept).logits[0]
            kept.crop(-1)
            return logits

    return step


def words(tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """A prompt of so many tokens."""
    return [torch.randint(3, _WORDS, (tokens,))]
