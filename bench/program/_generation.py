# SPDX-License-Identifier: MIT
"""The step of a token of a made Llama, after a prompt: [tokens] ids in, [1, vocabulary] out."""

import ctypes
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import metalcore

from ..harness import Bench, Built

_WORDS = 32000
_CONTEXT = 4096
# the token of each step
_TOKEN = 7

Build = Callable[[], Any]


def benches(op: str, width: int, layers: int) -> tuple[Bench, ...]:
    """Tokens of a model of that size in types of 4 bits, whose linear layers are ours. llama.cpp
    takes activations in 8 bits; ours has 16, and 8 where it says so."""
    return tuple(
        bench(op, kind, width, layers, scheme=scheme, activation=activation)
        for scheme in ("q4_0", "q4_K")
        for activation, kind in (("int16", scheme), ("int8", f"{scheme}, int8"))
    )


def bench(op: str, kind: str, width: int, layers: int, **packed: str) -> Bench:
    """A step by the tape and by transformers; of packed weights, also by llama.cpp, and by the tape
    with keys and values in 8 bits."""
    build = partial(_made, width, layers, **packed)
    # where activations have 8 bits, an almost equal one may be rounded to the next
    rounds_to = torch.bfloat16 if packed.get("activation") == "int8" else None
    plain = _by_transformers(build)
    peers = {"transformers": plain}
    if packed:
        peers["llama.cpp"] = _by_llama_cpp(build, packed["scheme"], flash=False)
        peers["llama.cpp, flash"] = _by_llama_cpp(build, packed["scheme"], flash=True)
        peers["8-bit cache"] = _by_tape(build, torch.int8, rounds_to=torch.bfloat16)
    return Bench(
        op=op,
        kind=kind,
        run=_by_tape(build, rounds_to=rounds_to),
        peers=peers,
        inputs=_words,
        sweep=({"tokens": 128}, {"tokens": 2000}) if packed else ({"tokens": 128},),
        dtypes=(torch.float32,),
        # the same weights, whose products round activations
        truth=lambda prompt: plain.build(prompt)(prompt),
        reduces_over=lambda prompt: width * (4 * layers) ** 2,
    )


@lru_cache(1)
def _made(width: int, layers: int, scheme: str = "", activation: str = "") -> Any:
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
        max_position_embeddings=_CONTEXT,
    )
    with torch.device("meta" if scheme else "cpu"):
        model = LlamaForCausalLM(config).eval()
    if scheme:
        _pack(model, scheme, activation)
        rotary: Any = model.model.rotary_emb
        model.model.rotary_emb = type(rotary)(config)
    return model


def _pack(model: nn.Module, scheme: str, activation: str) -> None:
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            rows = torch.randn(64, module.in_features) * module.in_features**-0.5
            blocks = metalcore.quantize_ggml(rows, scheme)
            whole = blocks.repeat(-(-module.out_features // 64), 1)[: module.out_features]
            parent, _, own = name.rpartition(".")
            packed = metalcore.GGMLLinear.from_blocks(whole.contiguous(), scheme)
            packed.activation = activation
            setattr(model.get_submodule(parent), own, packed)
        elif list(module.parameters(recurse=False)):
            shape = module.weight.shape  # type: ignore[union-attr]
            values = torch.randn(shape) if len(shape) == 2 else torch.ones(shape)  # type: ignore[arg-type,operator]
            module.weight = nn.Parameter(values, requires_grad=False)


def _by_transformers(build: Build) -> Built:
    def start(prompt: Tensor) -> Callable[[Tensor], Tensor]:
        from transformers import DynamicCache

        return _steps(build(), DynamicCache(), prompt)

    return Built(start)


def _by_tape(
    build: Build, dtype: torch.dtype | None = None, *, rounds_to: torch.dtype | None = None
) -> Built:
    def start(prompt: Tensor) -> Callable[[Tensor], Tensor]:
        model = build()
        decoder = metalcore.decoder(model, dtype=dtype)
        assert decoder.is_recorded, decoder.why_not
        step = _steps(model, decoder.cache(), prompt)

        def run(x: Tensor) -> Tensor:
            with decoder:
                return step(x)

        return run

    return Built(start, rounds_to)


def _steps(model: Any, kept: Any, prompt: Tensor) -> Callable[[Tensor], Tensor]:
    """The step after a prompt, again and again."""
    with torch.inference_mode():
        model(input_ids=prompt[None], past_key_values=kept)

    def step(_: Tensor) -> Tensor:
        with torch.inference_mode():
            token = torch.tensor([[_TOKEN]])
            logits: Tensor = model(input_ids=token, past_key_values=kept).logits[0]
            kept.crop(-1)
            return logits

    return step


def _by_llama_cpp(build: Build, scheme: str, *, flash: bool) -> Built:
    """`flash` is its way of attention in one pass."""

    def start(prompt: Tensor) -> Callable[[Tensor], Tensor]:
        import llama_cpp

        threads = torch.get_num_threads()
        model: Any = llama_cpp.Llama(
            str(_file(build, scheme)),
            n_ctx=_CONTEXT,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=flash,
            verbose=False,
        )
        model.eval(prompt.tolist())

        def step(_: Tensor) -> Tensor:
            model.n_tokens = len(prompt)
            model.eval([_TOKEN])
            logits = llama_cpp.llama_get_logits(model.ctx)
            values = (ctypes.c_float * _WORDS).from_address(ctypes.addressof(logits.contents))
            return torch.frombuffer(values, dtype=torch.float32)[None]

        return step

    return Built(start, torch.bfloat16)


@lru_cache(1)
def _saved(model: Any, scheme: str) -> TemporaryDirectory[str]:
    """A folder with the model as a file; it is there as long as somebody holds it."""
    folder = TemporaryDirectory()
    types = {"token_embd": "f32", ".*": scheme}
    metalcore.save_gguf(model, Path(folder.name) / "model.gguf", types)
    return folder


def _file(build: Build, scheme: str) -> Path:
    return Path(_saved(build(), scheme).name) / "model.gguf"


def _words(tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """A prompt of so many tokens."""
    return [torch.randint(3, _WORDS, (tokens,))]
