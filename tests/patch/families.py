# SPDX-License-Identifier: MIT
"""Tiny models of the families that `accelerate` is tested on."""

import math
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from metalcore._accuracy import tolerance

LAYERS, WIDTH, WITHIN, VOCABULARY = 2, 32, 64, 128
BATCH, TOKENS = 2, 16


class Family(NamedTuple):
    """Name in transformers, what its configuration adds, and which ops compute a forward pass."""

    name: str
    config: dict[str, Any]
    ops: dict[str, int]
    config_class: str = ""


def _ops(norm: str, norms: int, mlp: str, mlps: int = LAYERS) -> dict[str, int]:
    return {norm: norms, mlp: mlps, "rope": LAYERS, "cross_entropy_": 1}


# norms of a model: `per_layer` in each layer and one at the end
def _per_layer(norms: int) -> int:
    return LAYERS * norms + 1


_HEADS = {"head_dim": 8}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
FAMILIES = [
    Family("Llama", {}, _ops("rms_norm", _per_layer(2), "swiglu")),
    Family("Mistral", {}, _ops("rms_norm", _per_layer(2), "swiglu")),
    Family("Mixtral", {"num_local_experts": 4}, _ops("rms_norm", _per_layer(2), "swiglu")),
    Family("Qwen2", {}, _ops("rms_norm", _per_layer(2), "swiglu")),
    Family("Qwen3", _HEADS, _ops("rms_norm", _per_layer(4), "swiglu")),
    Family("Qwen2Moe", _EXPERTS, _ops("rms_norm", _per_layer(2), "swiglu", 2 * LAYERS)),
    Family("Gemma", _HEADS, _ops("rms_norm", _per_layer(2), "geglu")),
    Family(
        "Gemma2",
        {**_HEADS, "final_logit_softcapping": 3.0},
        _ops("rms_norm", _per_layer(4), "geglu"),
    ),
    Family("Gemma3", _HEADS, _ops("rms_norm", _per_layer(6), "geglu"), "Gemma3TextConfig"),
    Family(
        "Phi3",
        {
            "rope_parameters": {
                "rope_theta": 1e4,
                "rope_type": "default",
                "partial_rotary_factor": 0.5,
            }
        },
        _ops("rms_norm", _per_layer(2), "swiglu"),
    ),
    Family("Olmo2", {}, _ops("rms_norm", _per_layer(4), "swiglu")),
    Family("Granite", {"logits_scaling": 4.0}, _ops("rms_norm", _per_layer(2), "swiglu")),
    Family("SmolLM3", {"no_rope_layers": [1] * LAYERS}, _ops("rms_norm", _per_layer(2), "swiglu")),
    Family("Cohere", {}, _ops("layer_norm", _per_layer(1), "swiglu")),
    Family("GPTNeoX", {}, _ops("layer_norm", _per_layer(2), "gelu")),
    Family("Glm4", _HEADS, _ops("rms_norm", _per_layer(4), "swiglu")),
]
LLAMA = FAMILIES[0]


def build(family: Family = LLAMA, **changes: Any) -> Any:
    """A model with random weights, none of which has a special value."""
    config = getattr(transformers, family.config_class or f"{family.name}Config")(
        **{
            "hidden_size": WIDTH,
            "intermediate_size": WITHIN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **family.config,
            **changes,
        }
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family.name}ForCausalLM")(config)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.05 * torch.randn_like(p)
    return model


def text() -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, TOKENS))


def gradients(model: nn.Module, tokens: Tensor, **kwargs: Any) -> tuple[Any, dict[str, Tensor]]:
    """Outputs of a training step and all gradients."""
    model.zero_grad()
    out = model(tokens, labels=tokens, **kwargs)
    out.loss.backward()
    return out, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def allowed(dtype: torch.dtype = torch.float32) -> float:
    """How far two computations of a gradient may be apart.

    It passes about eight sums per layer forward and eight backward, one after the other, none
    longer than the vocabulary; what one of them may be off adds up like independent errors.
    """
    return math.sqrt(2 * 8 * LAYERS) * tolerance("rms_norm", dtype, VOCABULARY)
