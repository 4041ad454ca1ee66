# SPDX-License-Identifier: MIT
"""What the guide promises: the first bug, the gallery, the GitHub action and the hook."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mslsim.cli import app
from tests.mslsim.test_kernels import CORPUS, run

ROOT = Path(__file__).parents[2]
GALLERY = sorted((CORPUS / "gallery").glob("*.toml"))


def test_the_first_bug_takes_one_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["example"])
    assert result.exit_code == 0, result.output
    assert "total.metal:10: error: write of byte 4 of threadgroup part" in result.output
    command = re.search(r"mslsim (check .*)$", result.output, re.MULTILINE)[1].split()
    assert CliRunner().invoke(app, command).exit_code == 1
    lines = Path("total.metal").read_text().splitlines()
    barrier = re.search(r"(threadgroup_barrier\(.*\);)", result.output)[1]
    line = int(re.search(r"after line (\d+)", result.output)[1])
    Path("total.metal").write_text("\n".join([*lines[:line], barrier, *lines[line:]]))
    result = CliRunner().invoke(app, command)
    assert (result.exit_code, result.output) == (0, "total: no findings\n")
    assert CliRunner().invoke(app, ["example"]).exit_code == 2


def test_the_doctor_tells_what_is_used():
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert all(word in result.output for word in ("compiler: ", "cache: ", "checked kernels can"))


@pytest.mark.parametrize("launch", GALLERY, ids=lambda p: p.stem)
def test_the_gallery_shows_kernels_and_their_reports(launch):
    page = (ROOT / "docs/simulator-gallery.md").read_text()
    source = launch.with_suffix(".metal")
    assert source.read_text().split("\n\n", 1)[1].strip() in page
    said = " ".join(" ".join(map(str, run(launch, source).findings)).split())
    assert said in " ".join(page.split())


BAD = "kernel void bad(device float* x [[buffer(0)]]) { x[0] = nothing; }\n"
GOOD = """#include <metal_stdlib>
using namespace metal;
kernel void fill(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] = 1; }
"""
LAUNCH = 'kernel = "fill"\nthreads = [{n}]\ngroup_size = [8]\n[[arguments]]\nshape = [8]\n'


def action_steps():
    """The commands of action.yml after the installation."""
    text = (ROOT / "action.yml").read_text()
    blocks = re.findall(r"run: \|\n((?: {8}.*\n)+)|run: (.*)", text)
    steps = [textwrap.dedent(long) or short for long, short in blocks]
    return [step for step in steps if step.startswith(("mslsim", "failed="))]


def shell(command, folder, **inputs):
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    given = {"OPTIONS": "", "FILES": "", "LAUNCHES": "", **inputs}
    return subprocess.run(
        ["bash", "-e", "-c", command], cwd=folder, env={**os.environ, **given, "PATH": path},
        capture_output=True, text=True,
    )  # fmt: skip


def test_the_action_finds_what_is_wrong(tmp_path):
    (tmp_path / "bad.metal").write_text(BAD)
    (tmp_path / "good.metal").write_text(GOOD)
    (tmp_path / "good.toml").write_text(LAUNCH.format(n=8))
    inputs = {"FILES": "*.metal", "LAUNCHES": "*.toml", "OPTIONS": "-I ."}
    lint, check = action_steps()
    result = shell(lint, tmp_path, **inputs)
    assert result.returncode == 1
    matcher = json.loads((ROOT / ".github/mslsim-matcher.json").read_text())
    pattern = matcher["problemMatcher"][0]["pattern"][0]["regexp"]
    found = re.match(pattern, result.stdout.splitlines()[0])
    assert found.groups()[:4] == ("bad.metal", "1", "57", "error")
    assert shell(check, tmp_path, **inputs).returncode == 0
    (tmp_path / "good.toml").write_text(LAUNCH.format(n=16))
    result = shell(check, tmp_path, **inputs)
    assert result.returncode == 1
    assert re.match(pattern, result.stdout.splitlines()[0])[1] == "good.metal"


def test_the_action_needs_no_launches(tmp_path):
    (tmp_path / "good.metal").write_text(GOOD)
    for step in action_steps():
        assert shell(step, tmp_path, FILES="good.metal").returncode == 0


def test_the_hook_is_the_command(tmp_path):
    hook = (ROOT / ".pre-commit-hooks.yaml").read_text()
    entry, files = (re.search(rf"{key}: (.*)", hook)[1] for key in ("entry", "files"))
    assert re.search(files, "kernels/a.metal")
    (tmp_path / "good.metal").write_text(GOOD)
    (tmp_path / "bad.metal").write_text(BAD)
    assert shell(f"{entry} good.metal", tmp_path).returncode == 0
    assert shell(f"{entry} good.metal bad.metal", tmp_path).returncode == 1
