# SPDX-License-Identifier: MIT
"""Families that are built otherwise than a Llama: same loss and gradients, with dropout, undone."""

from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn

import metalcore
from metalcore._accuracy import error
from tests.patch.families import LAYERS, VOCABULARY, WIDTH, WITHIN, allowed, text

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": WITHIN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = {"num_key_value_heads": 2, "head_dim": 8}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}


class Family(NamedTuple):
    """The model and configuration of transformers, and what computes its layers after."""

    model: str
    config: str
    sizes: dict[str, Any]
    by: set[tuple[str, str, int]]


FAMILIES = [
    Family(
        "BertForMaskedLM", "BertConfig", _SIZES, {("mlp", "gelu", 3), ("norm", "layer_norm", 6)}
    ),
    Family("RobertaForMaskedLM", "RobertaConfig", _SIZES, {("mlp", "gelu", LAYERS)}),
    Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": WIDTH,
            "n_layer": LAYERS,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "loss_type": "ForCausalLM",
        },
        {("mlp", "gelu, tanh", LAYERS)},
    ),
    Family(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {**_SIZES, "cls_token_id": 1, "sep_token_id": 2, "mlp_dropout": 0.1},
        {("mlp", "geglu, one layer for gate and up", LAYERS)},
    ),
    Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": WIDTH,
            "d_ff": WITHIN,
            "num_layers": LAYERS,
            "num_heads": 4,
            "d_kv": 8,
            "feed_forward_proj": "gated-gelu",
            "pad_token_id": 0,
            "decoder_start_token_id": 0,
        },
        {("mlp", "geglu, tanh", 2 * LAYERS)},
    ),
    Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": WIDTH,
            "encoder_layers": LAYERS,
            "decoder_layers": LAYERS,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": WITHIN,
            "decoder_ffn_dim": WITHIN,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        {("mlp", "gelu", 2 * LAYERS)},
    ),
    Family(
        "CLIPVisionModel",
        "CLIPVisionConfig",
        {
            "hidden_size": WIDTH,
            "intermediate_size": WITHIN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 8,
        },
        {("mlp", "silu, scaled", LAYERS)},
    ),
    Family(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **_SIZES,
            **_EXPERTS,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
        {("rope", "apply_rotary_pos_emb, interleaved, then in halves", LAYERS)},
    ),
    Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        {**_SIZES, **_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
        {("rope", "apply_rotary_pos_emb", LAYERS)},
    ),
    Family(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **_SIZES,
            **_HEADS,
            **_EXPERTS,
            "num_experts": 4,
            "shared_expert_intermediate_size": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
        {("norm", "rms_norm, swiglu", 1)},
    ),
]


def build(family: Family) -> Any:
    """A model with random weights that drops what it drops in training."""
    torch.manual_seed(0)
    model = getattr(transformers, family.model)(
        getattr(transformers, family.config)(**family.sizes)
    )
    with torch.no_grad():
        for p in model.parameters():
            p += 0.05 * torch.randn_like(p)
    return model.train()


def step(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """The loss and all gradients, always with the same numbers for dropout."""
    inputs: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
    if "CLIP" in type(model).__name__:
        inputs = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 256).view(2, 3, 16, 16)}
    elif "Whisper" in type(model).__name__:
        inputs["input_features"] = torch.linspace(-1, 1, 2 * 8 * 32).view(2, 8, 32)
        del inputs["input_ids"]
    model.zero_grad()
    torch.manual_seed(1)
    out = model(**inputs)
    loss = out.loss if "labels" in inputs else out.last_hidden_state.square().mean()
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.model)
def test_loss_and_gradients_with_dropout(family: Family) -> None:
    model, tokens = build(family), text()
    plain = step(model, tokens)
    # parameters that hardly matter are compared with those that do
    largest = max(float(g.abs().max()) for n, g in plain.items() if n != "loss")
    with metalcore.accelerate(model) as summary:
        assert family.by <= {(r.layer, r.by, r.count) for r in summary.rows}, summary
        found = step(model, tokens)
    assert found.keys() == plain.keys()
    assert error(found.pop("loss"), plain["loss"]) <= allowed()
    for name, grad in found.items():
        assert float((grad - plain[name]).abs().max()) <= allowed() * largest, name
    again = step(model, tokens)
    assert all(torch.equal(again[n], g) for n, g in plain.items())


def test_t5_that_keeps_its_last_layers_in_float32() -> None:
    family = next(f for f in FAMILIES if f.config == "T5Config")
    model = build(family).eval().to(torch.bfloat16)
    layers = [m for m in model.modules() if type(m).__name__ == "T5DenseGatedActDense"]
    for layer in layers:
        layer.wo.float()
    x = torch.randn(2, 3, WIDTH, dtype=torch.bfloat16)
    plain = [layer(x) for layer in layers]
    with metalcore.accelerate(model):
        assert all(torch.equal(layer(x), y) for layer, y in zip(layers, plain, strict=True))
