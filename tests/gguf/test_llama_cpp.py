# SPDX-License-Identifier: MIT
"""llama.cpp opens the files that we write, and generates what transformers does."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from metalcore.gguf.load import load_gguf
from metalcore.gguf.save import save_gguf
from tests.gguf import tiny
from tests.gguf.test_models import KINDS, build
from tests.gguf.test_tokenizer import byte_level, sentence_pieces

llama_cpp = pytest.importorskip("llama_cpp")

PROMPT = [5, 9, 2, 14, 7]
NEW = 24


def opened(path: Path) -> Any:
    """With keys and values in float32."""
    kept = {"type_k": 0, "type_v": 0}
    return llama_cpp.Llama(str(path), n_ctx=64, n_threads=1, logits_all=True, verbose=False, **kept)


def greedy(model: Any, prompt: list[int], new: int) -> list[int]:
    found: list[int] = []
    model.reset()
    model.eval(prompt)
    while True:
        logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
        values = (ctypes.c_float * model.n_vocab()).from_address(ctypes.addressof(logits.contents))
        found.append(int(torch.frombuffer(values, dtype=torch.float32).argmax()))
        if len(found) == new:
            return found
        model.eval(found[-1:])


def by_transformers(model: Any, prompt: list[int], new: int) -> list[int]:
    model.generation_config.eos_token_id = None
    tokens: Tensor = model.generate(
        torch.tensor([prompt]), max_new_tokens=new, do_sample=False, pad_token_id=0
    )
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    save_gguf(model, tmp_path / "a.gguf", "f32", tokenizer=tiny.tokenizer())
    assert greedy(opened(tmp_path / "a.gguf"), PROMPT, NEW) == by_transformers(model, PROMPT, NEW)


@pytest.mark.parametrize("scheme", ["q4_0", "q4_K", "q8_0"])
def test_packed_weights(scheme: str, tmp_path: Path) -> None:
    """Sums it has learned: where it rounds activations does not matter."""
    save_gguf(tiny.trained(), tmp_path / "a.gguf", scheme, tokenizer=tiny.tokenizer())
    ours, theirs = load_gguf(tmp_path / "a.gguf"), opened(tmp_path / "a.gguf")
    for question, _ in tiny.SUMS[::5]:
        prompt = theirs.tokenize(question.encode(), add_bos=False)
        assert prompt == tiny.tokenizer()(question).input_ids
        # an answer, and its end
        assert greedy(theirs, prompt, 2) == by_transformers(ours, prompt, 2)


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    model = build("llama")
    save_gguf(model, tmp_path / "a.gguf", "f32")
    assert greedy(opened(tmp_path / "a.gguf"), PROMPT, NEW) == by_transformers(model, PROMPT, NEW)
    assert load_gguf(tmp_path / "a.gguf").tokenizer is None


@pytest.mark.parametrize("make", [byte_level, sentence_pieces], ids=lambda f: f.__name__)
def test_tokenizers(make: Any, tmp_path: Path) -> None:
    tokenizer = make("gpt-2") if make is byte_level else make()
    model = build("llama", vocab_size=len(tokenizer))
    save_gguf(model, tmp_path / "a.gguf", "f16", tokenizer=tokenizer)
    theirs = llama_cpp.Llama(str(tmp_path / "a.gguf"), vocab_only=True, verbose=False)
    for text in ("Hello, world!", "a", "it's 12345 o'clock", "déjà vu €5"):
        found = theirs.tokenize(text.encode(), add_bos=False)
        assert found == tokenizer(text, add_special_tokens=False).input_ids
