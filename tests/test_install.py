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
from metalcore import _installed, _native
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
    needed += ("release/mslsim/pyproject.toml",)
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

    monkeypatch.setattr(_installed, "version", missing)
    assert metalcore.__version__ == "0+unknown"


@pytest.mark.parametrize("torch_module", [None, "__version__ = '2.9.1'"])
def test_no_torch_or_an_old_one_is_an_error_of_one_line(
    torch_module: str | None, tmp_path: Path
) -> None:
    # -S: nothing of this environment
    (tmp_path / "metalcore").symlink_to(ROOT / "src/metalcore")
    if torch_module:
        (tmp_path / "torch.py").write_text(torch_module)
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import metalcore"
    found = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True)
    message = "metalcore needs torch 2.10 or newer" + (", got 2.9.1" if torch_module else "")
    assert f"ImportError: {message}: pip install" in found.stderr.splitlines()[-1]
    assert "No module named" not in found.stderr


def test_the_package_of_others_in_our_folder_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "metalcore-0.1.16.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: metalcore\nVersion: 0.1.16\n")
    (folder / "RECORD").write_text("metalcore/__init__.py,,\n")
    found = subprocess.run(
        [sys.executable, "-c", "import metalcore"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    last = found.stderr.splitlines()[-1]
    assert last.startswith("ImportError: metalcore: the package metalcore 0.1.16 is installed in")
    assert "pip uninstall metalcore" in last


def test_metalcore_works_without_the_simulator() -> None:
    program = (
        "import sys; sys.modules['mslsim'] = None\n"
        "import torch, metalcore\n"
        "from metalcore.metal import plans, source\n"
        "import metalcore.patch, metalcore.doctor\n"
        "print(metalcore.silu(torch.zeros(1)), len(list(plans.examples())) > 50)\n"
        "metalcore.simulate()"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout == "tensor([0.]) True\n"
    assert found.stderr.splitlines()[-1] == (
        "ImportError: simulate: needs mslsim: pip install mslsim"
    )


def test_both_distributions_have_one_version() -> None:
    version = importlib.metadata.version
    assert version("metalcore-torch") == version("mslsim") == metalcore.__version__


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
