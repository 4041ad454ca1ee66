# SPDX-License-Identifier: MIT
"""The CPU kernels under every instruction set that is built and that this CPU runs.

The ordinary run loads the best one; the tests of kernels run again here with each of the others.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from metalcore import _native

ROOT = Path(__file__).parent.parent.parent
FAMILIES = sorted(p.parent.name for p in ROOT.glob("src/metalcore/ops/*/__init__.py"))
OTHERS = [s for s in _native.usable_sets() if s in _native.built_sets() and s != _native.isa]
# the same for every set: compilers, derivatives, other devices, messages
SAME = "compile or registration or derivatives or metal or gpu or device or memory or named"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("other", OTHERS)
def test_kernels_of(family: str, other: str, record_property) -> None:  # type: ignore[no-untyped-def]
    command = [sys.executable, "-m", "pytest", f"tests/{family}", "--backend=cpu"]
    found = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-k", f"not ({SAME})"],
        env=os.environ | {"METALCORE_CPU": other},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    record_property(other, f"{family}, {found.stdout.splitlines()[-1]}")
    assert found.returncode == 0, found.stdout
