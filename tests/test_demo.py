# SPDX-License-Identifier: MIT
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from metalcore import Record, demo


@pytest.fixture(autouse=True)
def _as_users_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(False)
    small = {
        name: replace(kind, sizes=kind.tiny, vocabulary=64, contexts=kind.contexts and (16, 40))
        for name, kind in demo.KINDS.items()
    }
    for name, value in (("KINDS", small), ("_BATCH", 2), ("_TIME", 32), ("_NEW_TOKENS", 4)):
        monkeypatch.setattr(demo, name, value)


def test_the_demo_compares_both_sides_and_writes_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.html"
    assert demo.run(steps=2, html=report, device="cpu") == 0
    told = capsys.readouterr().out
    for word in ("time per step", "peak memory", "loss", "rms_norm_backward", "cpu:", "the same"):
        assert word in told, word
    html = report.read_text()
    assert html.count("<svg") == 4
    assert "sim:swiglu_backward_float" in html
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")


def test_the_demo_fails_when_an_op_leaves_its_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def by_reference(self: demo.trace, op: str, *rest: object) -> None:
        self.records.append(Record(op, "cpu", "float32", (), "reference", "", 0.0))

    monkeypatch.setattr(demo.trace, "add", by_reference)
    assert demo.run(steps=1, html=None, device="cpu") == 1
    assert "although there is a kernel: adamw_step" in capsys.readouterr().out


def test_the_demo_fails_when_losses_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "_allowed", lambda kind, steps: 0.0)
    assert demo.run(steps=1, html=None, device="cpu") == 1
    assert "the losses in the simulator differ by" in capsys.readouterr().out


def test_an_xlstm_is_compared_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.html"
    assert demo.run(steps=2, html=report, device="cpu", model="xlstm") == 0
    told = capsys.readouterr().out
    for word in (
        "mlstm_chunkwise_backward",
        "mlstm_step",
        "the same",
        "tokens per second after 40",
    ):
        assert word in told, word
    html = report.read_text()
    assert html.count("<svg") == 5
    assert "mlstm_gradient" in html


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        demo.run(steps=0)
    with pytest.raises(ValueError, match="model must be one of"):
        demo.run(model="gru")
