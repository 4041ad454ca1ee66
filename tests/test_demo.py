# SPDX-License-Identifier: MIT
from pathlib import Path

import pytest
import torch

from metalcore import demo


@pytest.fixture(autouse=True)
def _as_users_run_it() -> None:
    torch.use_deterministic_algorithms(False)


def test_the_demo_compares_both_sides_and_writes_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.html"
    assert demo.run(steps=3, html=report, device="cpu") == 0
    told = capsys.readouterr().out
    for word in ("time per step", "peak memory", "loss", "rms_norm_backward", "cpu:"):
        assert word in told, word
    html = report.read_text()
    assert html.count("<svg") >= 2
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")


def test_the_demo_fails_when_an_op_leaves_its_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from collections import Counter

    left = Counter({("rms_norm", "reference", ""): 1})
    monkeypatch.setattr(demo, "paths_of_step", lambda *_: left)
    assert demo.run(steps=1, html=None, device="cpu") == 1
