# SPDX-License-Identifier: MIT
"""Figures are data: they are stored by a run, and the documents show what is stored."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from metalcore.bench import beside, documents, precision, store
from metalcore.bench.harness import Row, cases
from metalcore.bench.machine import Machine
from metalcore.bench.run import available

README = documents.ROOT / "README.md"
MACHINE = Machine(
    *("A CPU", 4, 2, "Linux x86_64", "cpu", "avx2", "2.13.0", "0.1.0", "2026-01-31"), load=0.1
)
# 1.8x, but neither 4x256 nor 0x1f
FIGURE = re.compile(r"(?<![\w.])\d+(?:\.\d+)?x(?!\w)|\d ?%")


def _row(op: str, ratio: float = 2.0, **changes: object) -> Row:
    row = Row(op, "4x5", "float32", "cpu:avx2", "", 1.0, "torch", ratio, ratio, None, None, None)
    return replace(row, **changes)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store of a machine of class x86-avx2."""
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(store, "FOLDER", tmp_path / "bench/results")
    (tmp_path / "bench").mkdir()
    monkeypatch.setattr("metalcore._native.isa", "avx2")
    return tmp_path / "bench/results"


def test_the_page_is_what_the_data_generates() -> None:
    for file, text in documents.pages(store.load()).items():
        assert file.read_text() == text, f"{file.name}: run metalcore bench --docs"


def test_the_page_of_the_simulated_kernels_is_what_the_data_generates() -> None:
    assert beside.PAGE.read_text() == beside.page(), "run metalcore bench --docs"


def test_plots_of_precision_are_what_the_data_generates() -> None:
    page = (documents.ROOT / "docs/precision.md").read_text()
    for file, text in precision.plots(documents.PLOTS).items():
        assert file.read_text() == text, "run metalcore bench --docs"
        assert f"figures/{file.name}" in page


def test_every_plot_is_of_a_page() -> None:
    plots = set(documents.pages(store.load())) | set(precision.plots(documents.PLOTS))
    assert set(documents.PLOTS.glob("*")) == plots - {documents.PAGE}


@pytest.mark.parametrize("file", documents.documents(), ids=lambda file: file.name)
def test_quoted_figures_are_in_the_data(file: Path) -> None:
    text = file.read_text()
    assert documents.quoted(text, store.load()) == text, "run metalcore bench --docs"
    # a comment at the start of a line ends the paragraph
    assert not re.search(r"^ *<!-- [\w-]+:", text, re.MULTILINE)


@pytest.mark.parametrize("file", documents.documents(), ids=lambda file: file.name)
def test_no_figure_is_quoted_without_its_row(file: Path) -> None:
    # what a decision of the design was measured with stands beside the decision
    if file.name != "design.md":
        assert not FIGURE.findall(documents.QUOTED.sub("", file.read_text()))


def test_the_readme_quotes_at_most_six_figures() -> None:
    assert 3 <= len(documents.QUOTED.findall(README.read_text())) <= 6


def test_a_figure_that_is_not_in_the_data_is_refused() -> None:
    stored = {"x86-avx2": store.Results(MACHINE, [_row("train/silu (forward+backward)", 2.345)])}
    good = "<!-- x86-avx2: train/silu (forward+backward) 4x5 float32 -->9x"
    assert documents.quoted(good, stored).endswith("-->2.3x")
    for wrong, why in (
        ("<!-- x86-avx2: train/silu 4x5 float32 -->2.3x", "which is not stored"),
        ("<!-- arm64-neon: train/silu 4x5 float32 -->2.3x", "which is no stored machine class"),
        (good.replace("9x", "9%"), "the row has no such figure"),
    ):
        with pytest.raises(ValueError, match=why):
            documents.quoted(wrong, stored)


def test_memory_is_quoted_as_a_share() -> None:
    row = _row("program/step", mib=51.0, peer_mib=100.0, peer="torch fused")
    stored = {"x86-avx2": store.Results(MACHINE, [row])}
    text = "<!-- x86-avx2: program/step 4x5 float32 torch fused -->1%"
    assert documents.quoted(text, stored).endswith("-->51%")


def test_a_selection_replaces_its_own_rows_alone(folder: Path) -> None:
    store.add(MACHINE, [_row("train/silu"), _row("linalg/qr")], (), whole=True)
    store.add(MACHINE, [_row("train/silu", 3.14159)], {"train/silu"}, whole=False)
    (stored,) = store.load().values()
    assert [(row.op, row.ratio) for row in stored.rows] == [
        ("linalg/qr", 2.0),
        ("train/silu", 3.14),
    ]
    store.add(MACHINE, [_row("train/gelu")], {"train/gelu"}, whole=True)
    (stored,) = store.load().values()
    assert [row.op for row in stored.rows] == ["train/gelu"]
    assert stored.machine == MACHINE


def test_rows_that_say_nothing_are_not_stored(folder: Path) -> None:
    wrong = "skipped: wrong result"
    rows = [
        _row("a", ratio=None, peer_ms="not installed: scipy"),  # type: ignore[arg-type]
        _row("b", ratio=None, peer_ms=wrong),  # type: ignore[arg-type]
        _row("c", ratio=None, ms="failed: why"),  # type: ignore[arg-type]
    ]
    file = store.add(MACHINE, rows, (), whole=True)
    assert [row["op"] for row in json.loads(file.read_text())["rows"]] == ["b", "c"]


def test_figures_of_two_machines_are_not_mixed(folder: Path) -> None:
    store.add(MACHINE, [_row("train/silu")], (), whole=True)
    other = replace(MACHINE, threads=1)
    store.check(other, whole=True)
    with pytest.raises(ValueError, match="measured with threads 2, here it is 1; store all"):
        store.check(other, whole=False)


def test_figures_need_kernels_and_a_checkout(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.parent.parent / "pyproject.toml").unlink()
    with pytest.raises(ValueError, match="in a checkout of metalcore"):
        store.check(MACHINE, whole=True)
    (folder.parent.parent / "pyproject.toml").touch()
    monkeypatch.setattr("metalcore._native.isa", None)
    with pytest.raises(ValueError, match="no compiled kernels to measure"):
        store.check(MACHINE, whole=True)


def test_a_row_has_one_name() -> None:
    names = [
        (case.bench.title, case.shape, case.dtype)
        for benches in available().values()
        for case in cases(benches)
    ]
    assert len(names) == len(set(names))


def test_a_page_has_a_plot_and_a_table_for_each_family() -> None:
    rows = [
        _row("train/silu", 0.5),
        _row("train/silu (forward+backward)", 3.0),
        _row("train/gelu (tanh, forward+backward)", 4.0),
        _row("train/rms_norm", 8.0, peer="transformers"),
        _row("patch/silu (small)", peer_ms=0.998, backend=""),
        _row("patch/gelu (small)", backend="cpu:avx2"),
        _row("patch/silu", 1.5),
        _row("new/op", 1.5),
    ]
    texts = documents.pages({"x86-avx2": store.Results(MACHINE, rows)})
    page = texts.pop(documents.PAGE)
    assert [file.name for file in texts] == [
        f"x86-avx2-{family}.svg" for family in ("train", "patch", "new")
    ]
    assert "A CPU, 4 cores, Linux x86_64; 2 threads." in page
    assert "| `silu` | 0.50 | 3.0 | 4x5 float32 |" in page
    assert "| `gelu (tanh)` | - | 4.0 | 4x5 float32, with gradients |" in page
    assert "| transformers | 1 | 1 | 8.0 |" in page
    assert "Of 2 tiny calls, such as 4x5, 1 are left to torch. Asking costs them 2.0 to" in page
    plot = next(iter(texts.values()))
    assert plot.count('class="fill k0"') == 2  # silu, and the legend
    assert plot.count('class="ring k0"') == 3
    assert 'class="mark"' in plot
