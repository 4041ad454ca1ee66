# SPDX-License-Identifier: MIT
"""A model of transformers as a GGUF file, which llama.cpp and others run."""

import re
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from metalcore._check import expect
from metalcore._quantized_layers import GGMLEmbedding, GGMLExperts, GGMLLinear
from metalcore.gguf import architectures
from metalcore.gguf.architectures import Architecture
from metalcore.gguf.tokenizer import metadata_of
from metalcore.gguf.writer import Stored, Value, write_gguf
from metalcore.ops.quant._ggml import FORMATS
from metalcore.ops.quant.quantize_ggml import quantize_ggml

_PLAIN = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
SCHEMES = (*FORMATS, *_PLAIN)
# llama.cpp's number of a file's main type
_FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9}
_FILE_TYPES |= {"q4_K": 14, "q5_K": 16, "q6_K": 18, "iq4_nl": 25, "bf16": 32, "mxfp4": 38}
# what llama.cpp takes where rows are no multiple of 256
_SMALLER = {"q4_K": "q5_0", "q5_K": "q5_1", "q6_K": "q8_0"}
_PHI3 = frozenset({"<unk>", "<s>", "</s>", "<|endoftext|>"})

Progress = Callable[[str, int, int], None]


def save_gguf(
    model: Any,
    path: str | PathLike[str],
    scheme: str | Mapping[str, str] | None = None,
    *,
    tokenizer: Any = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a model as a GGUF file.

    Args:
        model: a llama, mistral, qwen2, qwen3 (moe), gemma2, gemma3 or phi3 of transformers, plain
            or packed.
        path: the file.
        scheme: the type of all matrices, such as "q4_K" or "f16". The output matrix gets q6_K where
            the others have fewer bits, as llama.cpp does it. Or a table of patterns and types:
            `{"ffn_down": "q6_K", ".*": "q4_K"}`, of which the first that is found in the tensor's
            name counts. Default: packed matrices as they are, others f16.
        tokenizer: of transformers; default `model.tokenizer`, if there is one.
        name: what the file calls the model.
        progress: called with the name of each tensor, how many are done and how many there are.

    Example:
        >>> metalcore.save_gguf(model, "model.gguf", "q4_K", tokenizer=tokenizer)
    """
    config = model.config
    architecture = architectures.of_model(config.model_type)
    _expect_schemes(scheme)
    tokenizer = tokenizer if tokenizer is not None else getattr(model, "tokenizer", None)
    says = {} if tokenizer is None else _tokenizer(tokenizer, config.vocab_size)
    metadata = _metadata(config, architecture, name or _default_name(architecture, says))
    tensors = _Tensors(model, architecture, scheme)
    metadata |= {"general.quantization_version": 2, "general.file_type": tensors.file_type}
    # llama.cpp opens no file that does not say what its tokenizer is
    metadata |= says or {"tokenizer.ggml.model": "none"}
    names = tensors.names()
    stored: dict[str, Stored] = {}
    for i, tensor in enumerate(names):
        stored[tensor] = tensors.stored(tensor)
        if progress is not None:
            progress(tensor, i + 1, len(names))
    for tensor, factors in _rope_tensors(config):
        stored[tensor] = Stored(factors, "f32")
    write_gguf(path, metadata, stored)


def _expect_schemes(scheme: str | Mapping[str, str] | None) -> None:
    given = [scheme] if isinstance(scheme, str) else list((scheme or {}).values())
    wrong = [one for one in given if one not in SCHEMES]
    expect(
        not wrong, "save_gguf", f"a scheme is one of {', '.join(SCHEMES)}, got {', '.join(wrong)}"
    )


def _tokenizer(tokenizer: Any, rows: int) -> dict[str, Any]:
    says = metadata_of(tokenizer)
    tokens = says["tokenizer.ggml.tokens"]
    expect(
        len(tokens) <= rows,
        "save_gguf",
        f"the tokenizer has {len(tokens)} tokens, the model has {rows} embeddings",
    )
    # embeddings that no token has: llama.cpp wants as many of both
    missing = rows - len(tokens)
    says["tokenizer.ggml.tokens"] = [*tokens, *(f"[PAD{len(tokens) + i}]" for i in range(missing))]
    says["tokenizer.ggml.token_type"] += [5] * missing
    if "tokenizer.ggml.scores" in says:
        says["tokenizer.ggml.scores"] += [-1e4] * missing
    return says


# -- metadata


def _default_name(architecture: Architecture, says: Mapping[str, Any]) -> str:
    # of what is called a phi3 llama.cpp wants the tokens of Phi-3
    is_other = architecture.name == "phi3" and not _PHI3.issubset(
        says.get("tokenizer.ggml.tokens", ())
    )
    return "model" if is_other else f"{architecture.name} model"


def _metadata(config: Any, architecture: Architecture, name: str) -> dict[str, Any]:
    # llama.cpp knows Mistral as a Llama, and by its name
    written = "llama" if architecture.name == "mistral" else architecture.name
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    said: dict[str, Any] = {
        "general.architecture": written,
        "general.name": name,
        f"{written}.block_count": config.num_hidden_layers,
        f"{written}.context_length": config.max_position_embeddings,
        f"{written}.embedding_length": config.hidden_size,
        f"{written}.feed_forward_length": config.intermediate_size,
        f"{written}.attention.head_count": heads,
        f"{written}.attention.head_count_kv": config.num_key_value_heads,
        f"{written}.rope.freq_base": float(rope["rope_theta"]),
        f"{written}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{written}.attention.key_length": size,
        f"{written}.attention.value_length": size,
        f"{written}.rope.dimension_count": size,
        f"{written}.vocab_size": config.vocab_size,
    }
    for key, attribute in architecture.numbers.items():
        value = getattr(config, attribute, None)
        if value is not None:
            said[f"{written}.{key}"] = value
    if rope["rope_type"] in ("linear", "yarn", "longrope"):
        if rope["rope_type"] != "longrope":
            said[f"{written}.rope.scaling.type"] = rope["rope_type"]
            said[f"{written}.rope.scaling.factor"] = float(rope["factor"])
        original = rope.get("original_max_position_embeddings")
        if original is not None:
            said[f"{written}.rope.scaling.original_context_length"] = original
    return said


def _rope_tensors(config: Any) -> Iterator[tuple[str, Tensor]]:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    if rope["rope_type"] == "llama3":
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        yield "rope_freqs.weight", architectures.llama3_factors(rope, size)
    if rope["rope_type"] == "longrope":
        yield "rope_factors_long.weight", torch.tensor(rope["long_factor"], dtype=torch.float32)
        yield "rope_factors_short.weight", torch.tensor(rope["short_factor"], dtype=torch.float32)


# -- tensors


class _Tensors:
    """The tensors of a model as they go into a file, one at a time."""

    def __init__(
        self, model: Any, architecture: Architecture, scheme: str | Mapping[str, str] | None
    ) -> None:
        self.model, self.architecture, self.scheme = model, architecture, scheme
        config = model.config
        self.modules = architectures.module_names(architecture, config.num_hidden_layers)
        if config.tie_word_embeddings:
            del self.modules["output"]

    @property
    def file_type(self) -> Value:
        main = self._type("blk.0.ffn_down.weight", 0) or self._packed_type() or "f16"
        return Value(_FILE_TYPES[main], 4)

    def _packed_type(self) -> str | None:
        layers = (m for m in self.model.modules() if isinstance(m, GGMLLinear))
        return next((layer.scheme for layer in layers), None)

    def names(self) -> list[str]:
        found = []
        for name, path in self.modules.items():
            module = self.model.get_submodule(path)
            found.append(f"{name}.weight")
            if getattr(module, "bias", None) is not None:
                found.append(f"{name}.bias")
        for i in range(self.model.config.num_hidden_layers):
            found += architectures.expert_names(self.architecture, i).values()
        return found

    def stored(self, tensor: str) -> Stored:
        if "_exps." in tensor:
            return self._experts(tensor)
        name, part = tensor.rsplit(".", 1)
        module = self.model.get_submodule(self.modules[name])
        value: Tensor = getattr(module, part).detach()
        if value.dim() == 1:
            offset = self.architecture.norm_offset if name.endswith("norm") else 0.0
            return Stored(self._in_order(name, value.float() + offset), "f32")
        packed = module if isinstance(module, GGMLLinear | GGMLEmbedding) else None
        if name.endswith("ffn_gate_inp"):
            # llama.cpp chooses experts by float32
            return Stored(value.float(), "f32")
        columns = module.in_features if isinstance(module, nn.Linear) else module.embedding_dim
        kind = self._type(tensor, columns)
        if packed is not None and kind in (None, packed.scheme):
            return Stored(self._in_order(name, value), packed.scheme)
        if packed is not None:
            value = packed.dequantized()
        return _as(self._in_order(name, value), kind or "f16")

    def _experts(self, tensor: str) -> Stored:
        layer, part = int(tensor.split(".")[1]), tensor.split("_")[1]
        module: Any = self.model.get_submodule(f"model.layers.{layer}.{self.architecture.experts}")
        if isinstance(module, GGMLExperts):
            layers = module.layers(part)
            kind = self._type(tensor, layers[0].in_features)
            if kind in (None, layers[0].scheme):
                return Stored(torch.stack([one.weight for one in layers]), layers[0].scheme)
            return _as(torch.stack([one.dequantized() for one in layers]), kind or "f16")
        half = module.gate_up_proj.shape[1] // 2
        chosen = {
            "gate": module.gate_up_proj[:, :half],
            "up": module.gate_up_proj[:, half:],
            "down": module.down_proj,
        }
        value: Tensor = chosen[part].detach()
        return _as(value, self._type(tensor, value.shape[-1]) or "f16")

    def _type(self, tensor: str, columns: int) -> str | None:
        """Which type a matrix gets; None for whatever it is."""
        if self.scheme is None:
            return None
        if isinstance(self.scheme, str):
            kind = self.scheme
            is_output = tensor == "output.weight" or (
                tensor == "token_embd.weight" and "output" not in self.modules
            )
            if is_output and kind not in ("q8_0", *_PLAIN):
                kind = "q6_K"
        else:
            patterns = self.scheme.items()
            kind = next((kind for pattern, kind in patterns if re.search(pattern, tensor)), "f16")
        if kind in _SMALLER and columns % 256:
            kind = _SMALLER[kind]
        return "f16" if kind in FORMATS and columns % FORMATS[kind].values else kind

    def _in_order(self, name: str, rows: Tensor) -> Tensor:
        kind = name.rsplit(".", 1)[-1]
        if not self.architecture.is_rotated or kind not in ("attn_q", "attn_k"):
            return rows
        config = self.model.config
        heads = config.num_attention_heads if kind == "attn_q" else config.num_key_value_heads
        return architectures.rotated_rows(rows, heads)


def _as(value: Tensor, kind: str) -> Stored:
    if kind in _PLAIN:
        return Stored(value.to(_PLAIN[kind]), kind)
    return Stored(quantize_ggml(value, kind), kind)
