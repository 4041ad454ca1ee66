# SPDX-License-Identifier: MIT
"""Kernels check what they rely on: no call of `torch.ops` reads or writes memory of others.

In a process of its own, whose end would be a failure that names the call.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from metalcore._op import Op

ROOT = Path(__file__).parent.parent
SHARES = 4


@pytest.mark.parametrize("share", range(SHARES))
def test_broken_arguments(share: int) -> None:
    names = sorted(Op.all)[share::SHARES]
    command = [sys.executable, "-m", "tests.raw_calls", *names]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    lines = run.stdout.splitlines()
    assert lines[-1:] == ["end"], (
        f"ended with {run.returncode} in {lines[-1:]}\n{run.stderr[-2000:]}"
    )
    assert sum(line.startswith("call ") for line in lines) > 20 * len(names)
    wrong = [line for line in lines if line.startswith("wrong ")]
    assert not wrong, "\n".join(wrong)
