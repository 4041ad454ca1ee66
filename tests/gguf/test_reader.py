# SPDX-License-Identifier: MIT
"""Good files are read as the `gguf` package reads them; bad ones are one error, at once."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from hypothesis import example, given
from hypothesis import strategies as st

from metalcore.gguf.format import TYPES, GGUFError
from metalcore.gguf.reader import GGUFFile
from metalcore.gguf.writer import Stored, Value, write_gguf
from tests.gguf.made import ARCHITECTURE, HOSTILE, file, number, string, tensor

GOOD = file(
    [ARCHITECTURE, number(b"llama.block_count", 2), string(b"x") + b"\x09\0\0\0" + b"\x08\0\0\0"
     + b"\x02" + bytes(7) + string(b"one") + string(b"two")],
    [tensor(b"a", [32, 2], 2, 0), tensor(b"b", [3], 0, 64)],
)  # fmt: skip


def test_a_good_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "good.gguf").write_bytes(GOOD)
    for read in (GGUFFile.of_bytes(GOOD), GGUFFile(tmp_path / "good.gguf")):
        assert read.architecture == "llama"
        assert read.metadata["x"] == ["one", "two"]
        assert read.packed("a").shape == (2, 18)
        assert read.tensor("b").tolist() == [0, 0, 0]
        assert read.tensors["a"].type.name == "q4_0"
        with pytest.raises(GGUFError, match="stored as q4_0"):
            read.tensor("a")


@pytest.mark.parametrize("case", HOSTILE)
def test_a_bad_file_is_one_error_with_a_position(case: str, tmp_path: Path) -> None:
    content, says = HOSTILE[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(GGUFError, match=says) as caught:
            GGUFFile(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert 0 <= caught.value.position <= len(content)
    assert f"at byte {caught.value.position}" in str(caught.value)


@pytest.mark.parametrize("end", range(0, len(GOOD) - 236, 7))
def test_a_file_that_ends_early_is_an_error(end: int) -> None:
    with pytest.raises(GGUFError):
        GGUFFile.of_bytes(GOOD[:end])


@given(
    st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=4),
    st.integers(0, len(GOOD)),
)
@example([(8, 255), (15, 255)], len(GOOD))
def test_any_bytes_are_read_or_refused(changes: list[tuple[int, int]], end: int) -> None:
    content = bytearray(GOOD)
    for position, byte in changes:
        content[position] = byte
    try:
        read = GGUFFile.of_bytes(content[:end])
    except GGUFError:
        return
    for name, info in read.tensors.items():
        assert read.packed(name).numel() == info.bytes
        assert info.start + info.bytes <= end


def test_types_are_those_of_the_gguf_package() -> None:
    theirs = {t.value: (t.name.lower(), *GGML_QUANT_SIZES[t]) for t in GGMLQuantizationType}
    assert {t.number: (t.name.lower(), t.block, t.bytes) for t in TYPES} == theirs


def test_the_writer_gives_the_bytes_of_the_gguf_package(tmp_path: Path) -> None:
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 2, 36), dtype=torch.uint8)
    plain = torch.randn(5, 7)
    half = torch.randn(9).half()
    theirs = GGUFWriter(tmp_path / "theirs.gguf", "llama")
    theirs.add_uint32("llama.block_count", 2)
    theirs.add_float32("llama.rope.freq_base", 1e4)
    theirs.add_bool("tokenizer.ggml.add_bos_token", True)
    theirs.add_string("general.name", "ä model")
    theirs.add_array("tokenizer.ggml.tokens", ["a", "b", "ü"])
    theirs.add_array("tokenizer.ggml.scores", [0.5, -1.0])
    theirs.add_array("tokenizer.ggml.token_type", [1, 3, -1])
    theirs.add_key_value("x.counts", [1, 2], GGUFValueType.ARRAY, GGUFValueType.UINT64)
    theirs.add_uint64("x.large", 1 << 40)
    theirs.add_tensor("blocks", blocks.numpy(), raw_dtype=GGMLQuantizationType.Q4_0)
    theirs.add_tensor("plain", plain.numpy())
    theirs.add_tensor("half", half.numpy())
    theirs.add_custom_alignment(64)
    theirs.write_header_to_file()
    theirs.write_kv_data_to_file()
    theirs.write_tensors_to_file()
    theirs.close()
    write_gguf(
        tmp_path / "ours.gguf",
        {
            "general.architecture": "llama",
            "llama.block_count": 2,
            "llama.rope.freq_base": 1e4,
            "tokenizer.ggml.add_bos_token": True,
            "general.name": "ä model",
            "tokenizer.ggml.tokens": ["a", "b", "ü"],
            "tokenizer.ggml.scores": [0.5, -1.0],
            "tokenizer.ggml.token_type": [1, 3, -1],
            "x.counts": Value([1, 2], 9, 10),
            "x.large": Value(1 << 40, 10),
        },
        {
            "blocks": Stored(blocks, "q4_0"),
            "plain": Stored(plain, "f32"),
            "half": Stored(half, "f16"),
        },
        alignment=64,
    )
    assert (tmp_path / "ours.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ours.gguf", "theirs.gguf"]
    read = GGUFFile(tmp_path / "ours.gguf")
    assert read.metadata["x.large"] == 1 << 40
    assert torch.equal(read.packed("blocks"), blocks)
    assert torch.equal(read.tensor("plain"), plain)
    by_them = {t.name: t for t in GGUFReader(tmp_path / "ours.gguf").tensors}
    for name, info in read.tensors.items():
        assert by_them[name].data_offset == info.start
        assert np.array_equal(by_them[name].data.reshape(-1).view(np.uint8),
                              read.packed(name).flatten().numpy())  # fmt: skip


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"a": Stored(torch.zeros(2, 17, dtype=torch.uint8), "q4_0")}, "whole q4_0 blocks"),
        ({"a": Stored(torch.zeros(2, 18), "q4_0")}, "must be uint8"),
        ({"a" * 64: Stored(torch.zeros(2), "f32")}, "up to 63 bytes"),
        ({"a": Stored(torch.zeros(()), "f32")}, "1 to 4 dimensions"),
    ],
)
def test_what_cannot_be_written_leaves_no_file(
    tensors: dict[str, Stored], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=says):
        write_gguf(tmp_path / "a.gguf", {"general.architecture": "llama"}, tensors)
    with pytest.raises(ValueError, match="empty array"):
        write_gguf(tmp_path / "a.gguf", {"x": []}, {})
    assert not [*tmp_path.iterdir()]


def test_a_tensor_that_begins_anywhere_is_read(tmp_path: Path) -> None:
    one, two = torch.tensor([7], dtype=torch.uint8), torch.tensor([1.5, -2])
    stored = {"a": Stored(one, "i8"), "b": Stored(two, "f32")}
    write_gguf(tmp_path / "odd.gguf", {"general.architecture": "llama"}, stored, alignment=1)
    read = GGUFFile(tmp_path / "odd.gguf")
    assert read.tensors["b"].start == read.tensors["a"].start + 1
    assert read.tensor("b").tolist() == [1.5, -2]
