# SPDX-License-Identifier: MIT
"""Models go into GGUF files and come back; packed weights compute what unpacked ones do."""

import copy
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from metalcore._quantized_layers import GGMLEmbedding, GGMLLinear
from metalcore.gguf.format import GGUFError
from metalcore.gguf.load import load_gguf
from metalcore.gguf.reader import GGUFFile
from metalcore.gguf.save import save_gguf
from metalcore.gguf.writer import Stored, write_gguf
from metalcore.ops.quant._ggml import FORMATS
from metalcore.ops.quant.quantize_ggml import dequantize_ggml
from tests.gguf import tiny

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": len(tiny.tokenizer()),
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "long_factor": [1 + i / 8 for i in range(32)],
    "short_factor": [1.0] * 32,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama 3, tied": (
        "llama",
        {
            "rope_parameters": LLAMA3,
            "tie_word_embeddings": True,
            "max_position_embeddings": 1 << 17,
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 128}),
    "qwen3, experts": (
        "qwen3_moe",
        {
            "head_dim": 128,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "norm_topk_prob": True,
        },
    ),
    "gemma2": ("gemma2", {"head_dim": 256}),
    "gemma3": ("gemma3_text", {"head_dim": 256}),
    "phi3": ("phi3", {}),
    "phi3, long": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64}),
}
# transformers' own loader leaves these out: the rotary factors, and the second base of Gemma 3
NOT_READ_BY_TRANSFORMERS = {"llama 3, tied", "phi3, long"}
TOKENS = torch.arange(2, 26).reshape(2, 12)


def build(kind: str, **changes: Any) -> Any:
    model_type, more = KINDS[kind]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, **more, **changes})
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter += torch.randn_like(parameter) * 0.1
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_what_is_read(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    save_gguf(model, tmp_path / "a.gguf", "f32", tokenizer=tiny.tokenizer())
    read = load_gguf(tmp_path / "a.gguf")
    assert type(read) is type(model)
    assert torch.equal(logits(read), logits(model))
    assert not read.training


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_compute_what_their_values_do(kind: str, tmp_path: Path) -> None:
    save_gguf(build(kind), tmp_path / "a.gguf", "q4_K", tokenizer=tiny.tokenizer())
    packed, plain = (load_gguf(tmp_path / "a.gguf", keep=keep) for keep in ("packed", "float"))
    assert isinstance(packed.model.embed_tokens, GGMLEmbedding)
    assert isinstance(packed.lm_head, GGMLLinear)
    difference = (logits(packed) - logits(plain)).norm() / logits(plain).norm()
    # 16-bit activations: 2e-5 per product
    assert difference < 5e-4
    save_gguf(packed, tmp_path / "b.gguf")
    first, second = GGUFFile(tmp_path / "a.gguf"), GGUFFile(tmp_path / "b.gguf")
    assert list(first.tensors) == list(second.tensors)
    for name in first.tensors:
        assert torch.equal(first.packed(name), second.packed(name)), name


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", [k for k in KINDS if k not in NOT_READ_BY_TRANSFORMERS])
def test_the_loader_of_transformers_reads_the_same(kind: str, tmp_path: Path) -> None:
    save_gguf(build(kind), tmp_path / "a.gguf", "q5_0", tokenizer=tiny.tokenizer())
    ours = load_gguf(tmp_path / "a.gguf", keep="float")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="a.gguf", dtype=torch.float32
    ).eval()
    difference = (logits(ours) - logits(theirs)).norm() / logits(ours).norm()
    assert difference < 1e-5


def test_rows_of_packed_queries_are_in_the_order_of_transformers(tmp_path: Path) -> None:
    model = build("llama")
    save_gguf(model, tmp_path / "a.gguf", "q8_0")
    layer = load_gguf(tmp_path / "a.gguf").model.layers[1].self_attn.k_proj
    wanted = model.model.layers[1].self_attn.k_proj.weight
    assert (layer.dequantized() - wanted).abs().max() < 0.02 * wanted.abs().max()
    in_file = GGUFFile(tmp_path / "a.gguf").packed("blk.1.attn_k.weight")
    assert not torch.equal(in_file, layer.weight)
    assert torch.equal(in_file[1], layer.weight[32])


def test_weights_are_views_of_the_file(tmp_path: Path) -> None:
    save_gguf(build("qwen2"), tmp_path / "a.gguf", "q8_0")
    model = load_gguf(tmp_path / "a.gguf")
    layers = model.model.layers
    stride = layers[1].mlp.up_proj.weight.data_ptr() - layers[0].mlp.up_proj.weight.data_ptr()
    tensors = GGUFFile(tmp_path / "a.gguf").tensors
    assert stride == tensors["blk.1.ffn_up.weight"].start - tensors["blk.0.ffn_up.weight"].start


def test_a_tied_output_is_in_memory_once(tmp_path: Path) -> None:
    save_gguf(build("llama 3, tied"), tmp_path / "a.gguf", "q8_0")
    model = load_gguf(tmp_path / "a.gguf")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "output.weight" not in GGUFFile(tmp_path / "a.gguf").tensors


@pytest.mark.parametrize("scheme", FORMATS)
def test_a_quantized_model_still_solves_its_task(scheme: str, tmp_path: Path) -> None:
    save_gguf(tiny.trained(), tmp_path / "a.gguf", scheme, tokenizer=tiny.tokenizer())
    model = load_gguf(tmp_path / "a.gguf")
    assert tiny.right(model, tiny.SUMS) == 1.0
    text = "3+4=7<end> a, b"
    assert model.tokenizer(text).input_ids == tiny.tokenizer()(text).input_ids
    assert model.tokenizer.decode(model.tokenizer(text).input_ids) == text


def test_a_file_of_the_gguf_package_is_loaded(tmp_path: Path) -> None:
    """Weights quantized and written by it, and read back as its own values."""
    model = build("qwen2")
    save_gguf(model, tmp_path / "a.gguf", "q4_0")
    file = GGUFFile(tmp_path / "a.gguf")
    for name, info in file.tensors.items():
        if info.type.name == "q4_0":
            theirs = gguf.dequantize(file.packed(name).numpy(), gguf.GGMLQuantizationType.Q4_0)
            assert torch.equal(dequantize_ggml(file.packed(name), "q4_0"), torch.from_numpy(theirs))


def test_types_without_kernels_are_unpacked_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build("qwen2")
    save_gguf(model, tmp_path / "a.gguf", "q8_0")
    file = GGUFFile(tmp_path / "a.gguf")
    tensors = {n: Stored(file.packed(n), i.type.name) for n, i in file.tensors.items()}
    for name, info in file.tensors.items():
        if info.type.name == "f32":
            tensors[name] = Stored(file.tensor(name), "f32")
    weight = model.model.layers[0].mlp.down_proj.weight
    ternary = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType.TQ2_0)
    tensors["blk.0.ffn_down.weight"] = Stored(torch.from_numpy(ternary), "tq2_0")
    write_gguf(tmp_path / "b.gguf", file.metadata, tensors)
    read = load_gguf(tmp_path / "b.gguf")
    assert "tq2_0" in caplog.text
    assert type(read.model.layers[0].mlp.down_proj) is torch.nn.Linear
    logits(read)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"qwen2.block_count": 1 << 30}, "block_count is 1 to 1024"),
        ({"qwen2.block_count": 3}, "no tensor blk.2"),
        ({"qwen2.block_count": 1}, "a qwen2 has not"),
        ({"qwen2.embedding_length": 512}, r"is \[52, 256\], the model has \[52, 512\]"),
        ({"qwen2.attention.head_count": 3}, "do not divide"),
        ({"qwen2.attention.head_count": 0}, "head_count is 1 to"),
        ({"qwen2.attention.head_count": "four"}, "head_count is 1 to"),
        ({"qwen2.rope.freq_base": float("nan")}, "a positive number"),
        ({"general.architecture": "nothing"}, "'nothing' are not known"),
        ({"qwen2.expert_count": 8}, "experts"),
        ({"split.count": 3}, "one of 3 parts: join them"),
        ({"tokenizer.ggml.tokens": ["a"]}, "1 tokens and 52 embeddings"),
        ({"tokenizer.ggml.eos_token_id": 999}, "eos token is 999 of 52"),
        ({"tokenizer.ggml.model": "bert"}, "kind 'bert' are not known"),
    ],
)
def test_a_file_that_is_no_such_model_is_refused(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    save_gguf(build("qwen2"), tmp_path / "a.gguf", "f16", tokenizer=tiny.tokenizer())
    file = GGUFFile(tmp_path / "a.gguf")
    tensors = {
        name: Stored(file.tensor(name), info.type.name) for name, info in file.tensors.items()
    }
    # the tokenizer has no merges, and an empty list has no kind
    said = {key: value for key, value in file.metadata.items() if value != []}
    write_gguf(tmp_path / "b.gguf", {**said, **change}, tensors)
    with pytest.raises(GGUFError, match=says):
        load_gguf(tmp_path / "b.gguf")


def test_schemes_by_pattern_and_by_size(tmp_path: Path) -> None:
    model = build("llama")
    save_gguf(model, tmp_path / "a.gguf", {"ffn_down": "q6_K", "attn": "q8_0", ".*": "q4_K"})
    types = {n: i.type.name for n, i in GGUFFile(tmp_path / "a.gguf").tensors.items()}
    assert types["blk.0.ffn_down.weight"] == "q6_K"
    assert types["blk.0.attn_q.weight"] == "q8_0"
    assert types["blk.0.ffn_up.weight"] == "q4_K"
    assert types["blk.0.attn_norm.weight"] == "f32"
    save_gguf(model, tmp_path / "a.gguf", "q4_0")
    assert GGUFFile(tmp_path / "a.gguf").tensors["output.weight"].type.name == "q6_K"
    with pytest.raises(ValueError, match="got q4_k"):
        save_gguf(model, tmp_path / "a.gguf", "q4_k")
    model.config = AutoConfig.for_model("gpt2")
    with pytest.raises(ValueError, match="have no GGUF architecture"):
        save_gguf(model, tmp_path / "a.gguf")


def test_a_chat_template_and_tokens_survive(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    save_gguf(build("llama"), tmp_path / "a.gguf", tokenizer=tokenizer)
    read = load_gguf(tmp_path / "a.gguf").tokenizer
    asked = [{"role": "user", "content": "1+1="}]
    assert read.apply_chat_template(asked, tokenize=False) == "1+1="
    assert read.eos_token == "<end>"
    assert read.pad_token_id == 0


def test_an_answer_ends_where_a_turn_does(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    model = build("llama")
    model.resize_token_embeddings(len(tokenizer))
    save_gguf(model, tmp_path / "a.gguf", "f16", tokenizer=tokenizer)
    ends = load_gguf(tmp_path / "a.gguf").generation_config.eos_token_id
    assert ends == [1, tokenizer.convert_tokens_to_ids("<|im_end|>")]


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_gguf(build("llama"), tmp_path / "a.gguf", "f16")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="load_gguf: needs transformers: pip install transform"):
        load_gguf(tmp_path / "a.gguf")


def test_a_weight_whose_memory_was_given_back_is_still_there(tmp_path: Path) -> None:
    save_gguf(build("qwen2"), tmp_path / "a.gguf", "q8_0")
    model, file = load_gguf(tmp_path / "a.gguf"), GGUFFile(tmp_path / "a.gguf")
    before = logits(model)
    for i, layer in enumerate(model.model.layers):
        assert torch.equal(layer.mlp.up_proj.weight, file.packed(f"blk.{i}.ffn_up.weight"))
    assert torch.equal(logits(copy.deepcopy(model)), before)
    changed = load_gguf(tmp_path / "a.gguf")
    up = changed.model.layers[0].mlp.up_proj
    up.weight.zero_()
    assert not torch.equal(logits(changed), before)
    assert not up.weight.any()
