# SPDX-License-Identifier: MIT
"""What the README prints runs as printed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_python_blocks_run(block: str) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", block], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "rms_norm_back" in run.stdout


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / link).exists(), link


def test_ci_is_the_test_command() -> None:
    assert "exec make test" in (ROOT / ".ci/run").read_text()
