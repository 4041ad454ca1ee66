# SPDX-License-Identifier: MIT
"""Training steps of small models of many families, accelerated and with overrides alone."""

from functools import partial
from typing import Any

import metalcore

from ._steps import accelerated, bench, language_model, plain, training_steps

# transformers' names, and what a small configuration of the family needs besides
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {"num_local_experts": 4},
    "qwen2": {},
    "qwen3": {"head_dim": 64},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 192},
    "gemma": {"head_dim": 64},
    "gemma2": {"head_dim": 64},
    "gemma3_text": {"head_dim": 64},
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "smollm3": {},
    "cohere": {},
    "gpt_neox": {},
    "glm4": {"head_dim": 64},
}
_WORDS, _LAYERS = 2000, 2

_small = partial(
    language_model,
    vocab_size=_WORDS,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=_LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    use_cache=False,
)
_models = {family: partial(_small, family, **more) for family, more in _FAMILIES.items()}

BENCHES = tuple(
    bench(
        "program/models",
        f"{kind}, {family}",
        model,
        run,
        {"torch": training_steps(model)},
        batch=2,
        tokens=128,
        words=_WORDS,
        layers=_LAYERS,
    )
    for family, model in _models.items()
    for kind, run in (
        ("accelerate", training_steps(model, accelerated)),
        ("overrides", training_steps(model, plain, metalcore.overrides)),
    )
)
