# SPDX-License-Identifier: MIT
"""What it takes to install and start: one Python everywhere, copies without metadata, odd GPUs."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import metalcore
from metalcore import _native
from metalcore.metal import run

ROOT = Path(__file__).parent.parent


def test_the_oldest_python_is_the_same_everywhere() -> None:
    text = {
        name: (ROOT / name).read_text()
        for name in (
            "pyproject.toml",
            "README.md",
            "docs/install.md",
            "Makefile",
            "requirements.txt",
        )
    }
    found = {
        *re.findall(r'requires-python = ">=([\d.]+)"', text["pyproject.toml"]),
        *re.findall(r'python_version = "([\d.]+)"', text["pyproject.toml"]),
        *re.findall(r"Python ([\d.]+\d) or newer", "".join(text.values())),
    }
    assert found == {"3.10"}
    # a version that needs a newer Python has an older one beside it
    newer = re.findall(
        r'^(\S+)==.*python_version >= "3.11"', text["requirements.txt"], re.MULTILINE
    )
    older = re.findall(r'^(\S+)==.*python_version < "3.11"', text["requirements.txt"], re.MULTILINE)
    assert set(newer) <= set(older)


def test_make_names_the_python_it_needs(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text(
        '#!/bin/sh\nexec python3 -c "import sys; sys.version_info = (3, 9); $(echo "$2")"\n'
    )
    old.chmod(0o755)
    command = ["make", "-f", str(ROOT / "Makefile"), f"PYTHON={old}", ".venv/requirements.ok"]
    (tmp_path / "requirements.txt").touch()
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert made.returncode != 0
    assert f"metalcore needs Python 3.10 or newer, {old} is 3.9" in made.stderr


def test_an_archive_without_git_has_code_to_lint(tmp_path: Path) -> None:
    needed = ("requirements.txt", "pyproject.toml", "CMakeLists.txt")
    code = ("csrc/a.cpp", "src/b.metal", "tests/c.h", "tests/mslsim/kernels/d.metal")
    for name in (*needed, *code):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    command = ["make", "-f", str(ROOT / "Makefile"), "-n", "format"]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    assert "clang-format -i csrc/a.cpp src/b.metal tests/c.h\n" in printed


def test_a_copy_without_metadata_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert metalcore.__version__ == "0+unknown"


def test_a_library_that_does_not_load_leads_to_the_doctor(tmp_path: Path) -> None:
    (tmp_path / f"_cpu_{_native.usable_sets()[-1]}.so").write_text("no library")
    program = "import metalcore, torch; print(metalcore.silu(torch.zeros(1)))"
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "METALCORE_LIBRARIES": str(tmp_path), "METALCORE_STRICT": ""},
        capture_output=True,
        text=True,
    )
    assert found.stdout == "tensor([0.])\n"
    assert "`metalcore doctor`" in found.stderr


def test_a_gpu_without_memory_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*size: int, **options: object) -> torch.Tensor:
        raise RuntimeError("MPS backend out of memory")

    run.has_metal_kernels.cache_clear()
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    monkeypatch.setattr("torch.empty", refuse)
    assert not metalcore.has_metal_kernels()
    monkeypatch.undo()
    run.has_metal_kernels.cache_clear()
    assert metalcore.has_metal_kernels() is torch.backends.mps.is_available()
