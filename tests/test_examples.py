# SPDX-License-Identifier: MIT
"""The programs and notebooks of examples/ run, at a small size, and do what they say."""

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import metalcore

FOLDER = Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def _as_a_reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("METALCORE_STRICT", raising=False)
    yield
    metalcore.disable_pytorch_overrides()


def main(name: str, **sizes: int) -> Any:
    return runpy.run_path(str(FOLDER / f"{name}.py"))["main"](**sizes)


def test_training_loop() -> None:
    losses = main("training_loop", steps=6, hidden=32, layers=1)
    assert losses[-1] < losses[0]


def test_trainer_lora() -> None:
    assert main("trainer_lora", steps=2, hidden=32) > 0


def test_pca() -> None:
    explained = main("pca", clouds=20, points=32)
    assert (explained.diff() <= 0).all()
    assert explained[:, :2].sum(-1).mean() > 0.4


def test_kalman() -> None:
    raw, filtered = main("kalman", tracks=50, steps=30)
    assert filtered < raw


def test_gaussian_process() -> None:
    before, after = main("gaussian_process", processes=8, points=16, steps=20)
    assert after < before


def test_muon() -> None:
    before, after = main("muon", steps=20, width=32)
    assert after < before


def test_race() -> None:
    broken, fixed = main("race")
    assert broken
    assert not fixed


def test_comfyui_node() -> None:
    node = runpy.run_path(str(FOLDER / "comfyui_node.py"))["NODE_CLASS_MAPPINGS"]["MetalcoreSwitch"]
    model = object()
    assert node().switch(model, True) == (model,)
    assert metalcore.get_active_overrides()
    node().switch(model, False)
    assert not metalcore.get_active_overrides()
    assert "model" in node.INPUT_TYPES()["required"]


@pytest.mark.parametrize("notebook", sorted(FOLDER.glob("*.ipynb")), ids=lambda p: p.stem)
def test_a_notebook_runs(notebook: Path) -> None:
    names: dict[str, object] = {}
    for number, cell in enumerate(json.loads(notebook.read_text())["cells"]):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec(compile("".join(cell["source"]), f"{notebook.name}:{number}", "exec"), names)


def test_every_example_is_in_the_list() -> None:
    text = (FOLDER / "README.md").read_text()
    for file in FOLDER.iterdir():
        if file.suffix in (".py", ".ipynb"):
            assert f"]({file.name})" in text, file.name
