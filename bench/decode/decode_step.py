# SPDX-License-Identifier: MIT
"""A token through 2 layers of a made Llama, with `tokens` in its cache."""

from typing import Any

import torch
from torch import Tensor

from metalcore.ops.decode.decode_step import decode_step

from ..harness import Bench, Built

_models: dict[int, tuple[Any, Any]] = {}


def _made(width: int) -> tuple[Any, Any]:
    if width not in _models:
        from transformers import LlamaConfig, LlamaForCausalLM

        from metalcore.patch.decoder import decoder

        heads = max(1, width // 64)
        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=2,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 4),
            vocab_size=1024,
        )
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
        _models[width] = (model, decoder(model))
    return _models[width]


def _inputs(width: int, tokens: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """The cache, and the place of the next token."""
    _, made = _made(width)
    store = made.make_store()
    store.reserve(1, tokens + 1, 0)
    store.values.normal_()
    made._make_tables(store.slots)
    where = (torch.tensor([7]), torch.tensor([0]), torch.tensor([tokens]), torch.tensor([0]))
    return made.tape, made._tensors, store.values, *where


def _run(*args: Any) -> Tensor:
    return decode_step(*args)


def _model(tape: str, tensors: list[Tensor], values: Tensor, *where: Tensor) -> Any:
    from transformers import DynamicCache

    width = tensors[0].shape[1]
    model, _ = _made(width)
    tokens = int(where[2])
    layers = [(x[0, :, :, :tokens], x[1, :, :, :tokens]) for x in values]

    def step(*_: Any) -> Tensor:
        with torch.inference_mode():
            cache = DynamicCache(ddp_cache_data=layers)
            logits: Tensor = model(input_ids=where[0][None], past_key_values=cache).logits[0]
            return logits

    return step


BENCHES = (
    Bench(
        op="decode/decode_step",
        run=_run,
        peers={"transformers": Built(_model)},
        inputs=_inputs,
        sweep=tuple({"width": w, "tokens": n} for w in (64, 1024) for n in (128, 2000)),
        dtypes=(torch.float32,),
        reduces_over=lambda *args: 4096,
        plot_over="tokens",
    ),
)
