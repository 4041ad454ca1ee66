# SPDX-License-Identifier: MIT
"""Which model of transformers a GGUF file is: its config, and where its tensors belong.

A file names tensors by what they are for (`blk.0.attn_q.weight`), transformers by where they are
(`model.layers.0.self_attn.q_proj.weight`). The tables below are read in both directions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from metalcore._check import expect
from metalcore.gguf.format import GGUFError
from metalcore.gguf.reader import GGUFFile

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}

_ROUTED = {
    **{k: v for k, v in _LAYER.items() if not k.startswith("ffn_") or k == "ffn_norm"},
    **_QK_NORMS,
    "ffn_gate_inp": "mlp.gate",
}

# What the tensors of rotary factors are called. They are part of the config of transformers.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class Architecture:
    """How files of an architecture differ from each other.

    Attributes:
        name: of the file, `general.architecture`.
        model_type: of transformers.
        layer: names of a layer's modules, of the file to those of transformers.
        is_rotated: rows of queries and keys are stored in the order of neighbours that rotate.
        norm_offset: what the file adds to the weights of norms.
        has_head_size: the config takes `head_dim`.
        numbers: further keys of the file, and what the config calls them.
        fixed: what the config has to say, and no file does.
        experts: the module of a layer's experts, if it has any.
    """

    name: str
    model_type: str
    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    is_rotated: bool = False
    norm_offset: float = 0.0
    has_head_size: bool = True
    numbers: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    experts: str | None = None


_ALL = [
    Architecture("llama", "llama", is_rotated=True),
    Architecture("mistral", "mistral", is_rotated=True),
    Architecture("qwen2", "qwen2", has_head_size=False),
    Architecture("qwen3", "qwen3", {**_LAYER, **_QK_NORMS}),
    Architecture(
        "qwen3moe",
        "qwen3_moe",
        _ROUTED,
        numbers={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        fixed={"norm_topk_prob": True},
        experts="mlp.experts",
    ),
    Architecture(
        "gemma2",
        "gemma2",
        _GEMMA,
        norm_offset=1.0,
        numbers={
            "attention.sliding_window": "sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
    ),
    Architecture(
        "gemma3",
        "gemma3_text",
        {**_GEMMA, **_QK_NORMS},
        norm_offset=1.0,
        numbers={"attention.sliding_window": "sliding_window"},
    ),
    Architecture(
        "phi3",
        "phi3",
        _PHI3,
        has_head_size=False,
        numbers={"attention.sliding_window": "sliding_window"},
    ),
]
BY_NAME = {a.name: a for a in _ALL}
BY_MODEL_TYPE = {a.model_type: a for a in _ALL}

# The largest numbers that a config may have: far above any model, far below what breaks a machine.
_LARGEST = {
    "block_count": 1 << 10,
    "embedding_length": 1 << 20,
    "feed_forward_length": 1 << 22,
    "attention.head_count": 1 << 12,
    "attention.head_count_kv": 1 << 12,
    "attention.key_length": 1 << 12,
    "context_length": 1 << 30,
    "rope.dimension_count": 1 << 12,
    "expert_count": 1 << 12,
    "expert_used_count": 1 << 12,
    "expert_feed_forward_length": 1 << 22,
    "attention.sliding_window": 1 << 30,
}
# Gemma's largest models scale their scores by the width of a head's share of the model.
_SCALED_BY_WIDTH = {("gemma2", 46), ("gemma3", 62)}


def of_file(file: GGUFFile) -> Architecture:
    name = file.architecture
    parts = file.metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise GGUFError(f"this is one of {parts} parts: join them with llama-gguf-split --merge", 0)
    if name not in BY_NAME:
        known = ", ".join(BY_NAME)
        raise GGUFError(f"models of architecture {name!r} are not known; known: {known}", 0)
    found = BY_NAME[name]
    if file.metadata.get(f"{name}.expert_count") and found.experts is None:
        raise GGUFError(f"{name} with experts (mixture of experts) is not known", 0)
    said = str(file.metadata.get("general.name", "")).lower()
    # llama.cpp knows Mistral as a Llama; the two differ in nothing but the class
    return BY_NAME["mistral"] if name == "llama" and "mistral" in said else found


def of_model(model_type: str) -> Architecture:
    known = ", ".join(BY_MODEL_TYPE)
    expect(
        model_type in BY_MODEL_TYPE,
        "save_gguf",
        f"models of type {model_type!r} have no GGUF architecture here; known: {known}",
    )
    return BY_MODEL_TYPE[model_type]


def module_names(architecture: Architecture, layers: int) -> dict[str, str]:
    """Of each tensor's name in a file, without `.weight` or `.bias`, the module of transformers."""
    names = {"token_embd": _OUTER["token_embd"]}
    for i in range(layers):
        for ours, theirs in architecture.layer.items():
            names[f"blk.{i}.{ours}"] = f"model.layers.{i}.{theirs}"
    return names | {name: _OUTER[name] for name in ("output_norm", "output")}


def expert_names(architecture: Architecture, layer: int) -> dict[str, str]:
    """Of the parts of a layer's experts, the names of their tensors; none if it has no experts."""
    if architecture.experts is None:
        return {}
    return {part: f"blk.{layer}.ffn_{part}_exps.weight" for part in ("gate", "up", "down")}


def rotated_rows(rows: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys, [heads * size, ...], in the order of a file: partners in the
    rotation become neighbours."""
    paired = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return paired.transpose(1, 2).reshape(rows.shape)


def unrotated_rows(rows: Tensor, heads: int) -> Tensor:
    """The way back of `rotated_rows`; rows of packed blocks stay whole."""
    paired = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return paired.transpose(1, 2).reshape(rows.shape)


# -- config


def config_of(file: GGUFFile, architecture: Architecture) -> dict[str, Any]:
    """The arguments of transformers' config, every number of which is checked."""
    found = _Numbers(file)
    heads = found.count("attention.head_count")
    width = found.count("embedding_length")
    config: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": found.count("block_count"),
        "intermediate_size": found.count("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": found.count("attention.head_count_kv", heads),
        "max_position_embeddings": found.count("context_length"),
        "rms_norm_eps": found.positive("attention.layer_norm_rms_epsilon"),
        "vocab_size": _vocabulary(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    size = found.count("attention.key_length", width // heads)
    if architecture.has_head_size:
        config["head_dim"] = size
    for key, name in architecture.numbers.items():
        if found.has(key):
            config[name] = found.count(key) if key in _LARGEST else found.positive(key)
    config |= architecture.fixed
    if architecture.norm_offset:
        by_width = (architecture.name, config["num_hidden_layers"]) in _SCALED_BY_WIDTH
        config["query_pre_attn_scalar"] = width // heads if by_width else size
    for key in ("bos", "eos", "padding"):
        token = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        config[f"{key.replace('padding', 'pad')}_token_id"] = token
    config["rope_parameters"] = _rope(file, architecture, found, size)
    if (
        architecture.name == "phi3"
        and "original_max_position_embeddings" in (config["rope_parameters"])
    ):
        config["original_max_position_embeddings"] = config["rope_parameters"][
            "original_max_position_embeddings"
        ]
    _expect_heads(config, size)
    return config


def _expect_heads(config: dict[str, Any], size: int) -> None:
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    if heads % shared or config["hidden_size"] % heads or size % 2:
        raise GGUFError(
            f"{heads} heads of {size} with {shared} of keys do not divide the width of "
            f"{config['hidden_size']}",
            0,
        )


def _vocabulary(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise GGUFError("there is no matrix token_embd.weight", 0)
    rows = embedding.shape[0]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if tokens is not None and len(tokens) != rows:
        raise GGUFError(f"{len(tokens)} tokens and {rows} embeddings", embedding.start)
    return rows


def _rope(
    file: GGUFFile, architecture: Architecture, found: "_Numbers", size: int
) -> dict[str, Any]:
    theta = found.positive("rope.freq_base", 10_000.0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = file.metadata.get(f"{file.architecture}.rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": found.positive("rope.scaling.factor")}
        if found.has("rope.scaling.original_context_length"):
            original = found.count("rope.scaling.original_context_length")
            rope["original_max_position_embeddings"] = original
    if "rope_freqs.weight" in file.tensors:
        rope |= _llama3(file, theta, size)
    if "rope_factors_long.weight" in file.tensors:
        rope |= {
            "rope_type": "longrope",
            "long_factor": file.tensor("rope_factors_long.weight").tolist(),
            "short_factor": file.tensor("rope_factors_short.weight").tolist(),
            "original_max_position_embeddings": found.count("rope.scaling.original_context_length"),
        }
    if architecture.name == "gemma3":
        # of each six layers one sees everything; the others look back a little, by this base
        return {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        }
    return rope


def llama3_factors(rope: Mapping[str, Any], size: int) -> Tensor:
    """What Llama 3 divides the rotary frequencies by, [size / 2]."""
    exponent = torch.arange(0, size, 2, dtype=torch.float32) / size
    wavelength = 2 * torch.pi * rope["rope_theta"] ** exponent
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    share = (original / wavelength - low) / (high - low)
    kept: Tensor = ((1 - share) / factor + share).clamp(1 / factor, 1)
    return 1 / kept


def _llama3(file: GGUFFile, theta: float, size: int) -> dict[str, Any]:
    """The file has the factors, transformers wants the numbers that they are made of."""
    info = file.tensors["rope_freqs.weight"]
    if info.type.name != "f32" or info.shape != (size // 2,):
        raise GGUFError(f"rope_freqs.weight is not {size // 2} of f32", info.start)
    factors = file.tensor("rope_freqs.weight")
    rope = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if not (factors >= 1).all() or not torch.allclose(llama3_factors(rope, size), factors, 1e-3):
        raise GGUFError("rope_freqs.weight has not the rotary factors of a Llama 3", info.start)
    return rope


class _Numbers:
    """The numbers of a file's own architecture, none of which is believed."""

    def __init__(self, file: GGUFFile) -> None:
        self._metadata, self._prefix = file.metadata, file.architecture

    def has(self, key: str) -> bool:
        return f"{self._prefix}.{key}" in self._metadata

    def _get(self, key: str, default: Any) -> Any:
        found = self._metadata.get(f"{self._prefix}.{key}", default)
        if found is None:
            raise GGUFError(f"the file does not say {self._prefix}.{key}", 0)
        return found

    def count(self, key: str, default: int | None = None) -> int:
        value, largest = self._get(key, default), _LARGEST.get(key, 1 << 30)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]
        if type(value) is not int or not 0 < value <= largest:
            raise GGUFError(f"{self._prefix}.{key} is 1 to {largest}, got {str(value)[:80]}", 0)
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or not 0 < value < 1e30:
            raise GGUFError(f"{self._prefix}.{key} is a positive number, got {str(value)[:80]}", 0)
        return value  # type: ignore[no-any-return]
