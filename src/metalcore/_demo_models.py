# SPDX-License-Identifier: MIT
"""The models of `metalcore demo`: small ones of transformers, with random weights."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn

_SEED = 0
# Tokens of a context that are read at a time, and those that are timed after it.
_READ, _TIMED = 4096, 16


@dataclass
class Kind:
    """A model: its name and sizes, those of the tiny one for the simulator, which is some hundred
    times slower than the CPU kernels, and the contexts after which steps are timed."""

    name: str
    make: Callable[[int, dict[str, Any]], nn.Module]
    sizes: dict[str, Any]
    tiny: dict[str, Any]
    vocabulary: int = 8192
    contexts: Sequence[int] = ()

    def build(self, vocabulary: int, sizes: dict[str, Any]) -> nn.Module:
        """The model; nothing is downloaded."""
        torch.manual_seed(_SEED)
        return self.make(vocabulary, sizes)


def _of_transformers(name: str, config: dict[str, Any]) -> nn.Module:
    try:
        transformers = import_module("transformers")
    except ImportError as missing:
        raise RuntimeError("demo: needs a model of transformers: pip install transformers") from (
            missing
        )
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**config)
    )
    return model


def _llama(vocabulary: int, sizes: dict[str, Any]) -> nn.Module:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return _of_transformers("Llama", {"vocab_size": vocabulary, **heads, **sizes})


def _xlstm(vocabulary: int, sizes: dict[str, Any]) -> nn.Module:
    # a cache is written in place, which gradients forbid; writing asks for it by itself
    blocks = {"num_blocks": sizes["num_hidden_layers"], "num_heads": 4, "use_cache": False}
    return _of_transformers("xLSTM", {"vocab_size": vocabulary, **blocks, **sizes})


KINDS = {
    "llama": Kind(
        "Llama",
        _llama,
        {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4},
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    ),
    "xlstm": Kind(
        "xLSTM",
        _xlstm,
        {"hidden_size": 256, "num_hidden_layers": 4},
        {"hidden_size": 128, "num_hidden_layers": 2},
        contexts=(1024, 4096, 16384, 65536),
    ),
}


@torch.no_grad()
def tokens_per_second(
    model: Any, contexts: Sequence[int], device: str
) -> list[tuple[float, float]]:
    """How fast single steps are after contexts of these lengths."""
    tokens = torch.randint(model.config.vocab_size, (1, _READ), device=device)
    found, read, state = [], 0, {"cache_params": None, "use_cache": True}
    was_training = model.training
    model.eval()
    for context in contexts:
        while read < context:
            part = tokens[:, : min(_READ, context - read)]
            # without the logits of all tokens
            state["cache_params"] = model.backbone(part, **state).cache_params
            read += part.shape[1]
        model(tokens[:, :1], **state)
        start = time.perf_counter()
        for _ in range(_TIMED):
            # item() waits for the GPU
            model(tokens[:, :1], **state).logits[0, 0, 0].item()
        found.append((float(context), _TIMED / (time.perf_counter() - start)))
    model.train(was_training)
    return found
