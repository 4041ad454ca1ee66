# SPDX-License-Identifier: MIT
"""Tiles in a file: the same products, nothing made twice, and no file that is half written."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from metalcore import _quantized_layers
from metalcore._quantized_layers import GGMLLinear
from metalcore.gguf import tiles as cache
from metalcore.gguf.load import load_gguf
from metalcore.gguf.save import save_gguf
from tests.gguf import tiny
from tests.gguf.test_models import build, logits


def refuse(*_: Any) -> Any:
    raise AssertionError("tiles were made")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_gguf(tiny.trained(), tmp_path / "tiny.gguf", "q4_K", tokenizer=tiny.tokenizer())
    return tmp_path / "tiny.gguf"


@pytest.mark.parametrize("kind", ["llama", "llama 3, tied", "qwen3, experts"])
def test_a_second_load_maps_what_the_first_made(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = tmp_path / "a.gguf", tmp_path / "new" / "tiles"
    save_gguf(build(kind), path, "q4_K", tokenizer=tiny.tokenizer())
    truth = logits(load_gguf(path))
    assert torch.equal(logits(load_gguf(path, tiles=folder)), truth)
    (file,) = folder.iterdir()
    written = file.stat().st_mtime_ns
    monkeypatch.setattr(_quantized_layers, "pack_ggml", _only_sizes(_quantized_layers.pack_ggml))
    assert torch.equal(logits(load_gguf(path, tiles=folder)), truth)
    assert [f.stat().st_mtime_ns for f in folder.iterdir()] == [written]


def _only_sizes(pack: Any) -> Any:
    return lambda blocks, type: pack(blocks, type) if blocks.is_meta else refuse()


def test_another_file_has_other_tiles(model: Path, tmp_path: Path) -> None:
    load_gguf(model, tiles=tmp_path / "tiles")
    changed = copy.deepcopy(tiny.trained())
    changed.lm_head.weight.data = -changed.lm_head.weight.data
    save_gguf(changed, model, "q4_K", tokenizer=tiny.tokenizer())
    found = load_gguf(model, tiles=tmp_path / "tiles")
    assert torch.equal(
        found(torch.tensor([[5]])).logits, load_gguf(model)(torch.tensor([[5]])).logits
    )
    assert len(list((tmp_path / "tiles").iterdir())) == 2


def test_a_file_that_is_cut_off_is_refused(model: Path, tmp_path: Path) -> None:
    load_gguf(model, tiles=tmp_path / "tiles")
    (file,) = (tmp_path / "tiles").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(OSError, match="delete it"):
        load_gguf(model, tiles=tmp_path / "tiles")


def test_a_load_that_is_stopped_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(layer: GGMLLinear) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(GGMLLinear, "forget_weight", stopped)
        with pytest.raises(KeyboardInterrupt):
            load_gguf(model, tiles=tmp_path / "tiles")
    assert not list((tmp_path / "tiles").iterdir())
    assert tiny.right(load_gguf(model, tiles=tmp_path / "tiles"), tiny.SUMS) > 0.9


def test_a_weight_that_changes_leaves_its_tiles(model: Path, tmp_path: Path) -> None:
    found = load_gguf(model, tiles=tmp_path / "tiles")
    layer, x = found.model.layers[0].mlp.down_proj, torch.randn(1, 256)
    before = layer(x)
    with torch.no_grad():
        layer.weight.copy_(layer.weight.flip(0))
    assert torch.equal(layer(x), before.flip(-1))
    assert torch.equal(
        load_gguf(model, tiles=tmp_path / "tiles").model.layers[0].mlp.down_proj(x), before
    )


def test_tiles_are_for_packed_weights_on_a_cpu(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="packed weights on a CPU"):
        load_gguf(model, keep="float", tiles=tmp_path)


def test_layouts_are_told_apart(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_gguf(model, tiles=tmp_path / "tiles")
    pack = cache.pack_ggml
    monkeypatch.setattr(cache, "pack_ggml", lambda blocks, type: pack(blocks, type).flip(-1))
    load_gguf(model, tiles=tmp_path / "tiles")
    assert len(list((tmp_path / "tiles").iterdir())) == 2
