# SPDX-License-Identifier: MIT
"""Tokenizers go into files and come back with the same tokens for any text."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from metalcore.gguf import tokenizer as it
from metalcore.gguf.format import GGUFError
from metalcore.gguf.reader import GGUFFile
from metalcore.gguf.writer import write_gguf

CORPUS = (
    Path(it.__file__).read_text() * 2
    + " The quick brown fox jumps over the lazy dog's back. Ünïcödé €"
)
TEXTS = ["", " ", "a", "Hello, world!", "  two  spaces\n\nand lines ",
         "déjà vu €5 \u4f60\u597d \U0001f600",
         "<end>it's 12345 o'clock<end>", "x" * 50, CORPUS[:400]]  # fmt: skip


def byte_level(pre: str) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    if pre == "gpt-2":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(it._CUTS[pre]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(CORPUS.splitlines(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<end>", clean_up_tokenization_spaces=False
    )


def sentence_pieces() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    space = it._SPACE
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend(space), normalizers.Replace(" ", space)]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace(space, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=["<unk>", "<s>", "<end>", *bytes_], show_progress=False
    )
    made.train_from_iterator([line.replace(" ", space) for line in CORPUS.splitlines()], trainer)
    # bytes are no added tokens
    described = json.loads(made.to_str())
    described["added_tokens"] = [t for t in described["added_tokens"] if "0x" not in t["content"]]
    made = Tokenizer.from_str(json.dumps(described))
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="<end>",
        clean_up_tokenization_spaces=False,
    )


def through_a_file(tokenizer: Any, path: Path, **changes: Any) -> Any:
    says = {"general.architecture": "llama", **it.metadata_of(tokenizer), **changes}
    write_gguf(path, {k: v for k, v in says.items() if v is not None}, {})
    return it.tokenizer_of(GGUFFile(path))


def same(ours: Any, theirs: Any, text: str) -> bool:
    return bool(ours(text).input_ids == theirs(text).input_ids)


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe", "tekken"])
def test_byte_level_tokens_come_back(pre: str, tmp_path: Path) -> None:
    tokenizer = byte_level(pre)
    read = through_a_file(tokenizer, tmp_path / "a.gguf")
    assert it.metadata_of(tokenizer)["tokenizer.ggml.pre"] == pre
    for text in TEXTS:
        assert same(read, tokenizer, text), text
        assert read.decode(read(text).input_ids) == text
    assert read.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize("has_merges", [True, False])
def test_sentence_pieces_come_back(has_merges: bool, tmp_path: Path) -> None:
    tokenizer = sentence_pieces()
    changes = {} if has_merges else {"tokenizer.ggml.merges": None}
    read = through_a_file(tokenizer, tmp_path / "a.gguf", **changes)
    assert len(read) == len(tokenizer)
    for text in TEXTS[3:]:
        assert same(read, tokenizer, text), text
        assert read.decode(read(text).input_ids) == tokenizer.decode(tokenizer(text).input_ids)


def test_a_first_token_is_set_where_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = sentence_pieces()
    read = through_a_file(tokenizer, tmp_path / "a.gguf", **{"tokenizer.ggml.add_bos_token": True})
    assert read("hello").input_ids == [tokenizer.bos_token_id, *tokenizer("hello").input_ids]
    again = through_a_file(read, tmp_path / "b.gguf")
    assert same(again, read, "hello")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_transformers_reads_the_same_tokens(kind: str, tmp_path: Path) -> None:
    tokenizer = byte_level("qwen2") if kind == "bytes" else sentence_pieces()
    read = through_a_file(tokenizer, tmp_path / "a.gguf")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf")
    for text in ("Hello, world!", "it's 12345 o'clock", "dejà vu €5"):
        assert same(read, theirs, text), text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokenizer.ggml.token_type": [1]}, "1 properties of"),
        ({"tokenizer.ggml.merges": ["ab"]}, "is no pair"),
        ({"tokenizer.ggml.eos_token_id": 1 << 20}, "eos token is 1048576"),
        ({"tokenizer.ggml.model": "rwkv"}, "'rwkv' are not known"),
    ],
)
def test_a_tokenizer_that_makes_no_sense_is_refused(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(GGUFError, match=says):
        through_a_file(byte_level("gpt-2"), tmp_path / "a.gguf", **change)


def test_words_are_no_pairs() -> None:
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(ValueError, match="must merge pairs"):
        it.metadata_of(PreTrainedTokenizerFast(tokenizer_object=words))
