# SPDX-License-Identifier: MIT
"""The command line on files of the corpus."""

import json
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from mslsim.cli import app

RACE = Path(__file__).parent / "kernels" / "race"


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_check_prints_findings_like_a_compiler():
    result = invoke(
        "check", RACE / "missing_barrier.metal", "--spec", RACE / "missing_barrier.toml"
    )
    assert result.exit_code == 1
    assert (
        "missing_barrier.metal:9: error: " in result.output and "[race in reverse]" in result.output
    )
    assert "reverse: 1 finding" in result.output


def test_check_of_a_good_kernel_succeeds():
    fixed = RACE / "missing_barrier_fixed.metal"
    result = invoke("check", fixed, "--spec", RACE / "missing_barrier.toml")
    assert (result.exit_code, result.output.strip()) == (0, "reverse: no findings")


def test_check_as_json():
    arguments = (RACE / "missing_barrier.metal", "--spec", RACE / "missing_barrier.toml", "--json")
    result = invoke("check", *arguments)
    report = json.loads(result.output)
    assert not report["ok"]
    assert (report["findings"][0]["kind"], report["findings"][0]["line"]) == ("race", 9)


def test_run_writes_the_buffers(tmp_path):
    fixed = RACE / "missing_barrier_fixed.metal"
    result = invoke("run", fixed, "--spec", RACE / "missing_barrier.toml", "-o", tmp_path)
    assert result.exit_code == 0
    np.testing.assert_array_equal(np.load(tmp_path / "argument0.npy"), np.arange(64)[::-1])


def test_lint():
    strict = RACE.parent / "strict"
    result = invoke("lint", strict / "recursion.metal")
    assert result.exit_code == 1 and "recursion is not allowed" in result.output
    assert invoke("lint", strict / "recursion_fixed.metal").exit_code == 0
    both = invoke("lint", strict / "recursion_fixed.metal", strict / "recursion.metal")
    assert (both.exit_code, both.output) == (1, result.output)


def test_lint_registers(tmp_path):
    text = """#include <metal_stdlib>
    kernel void pick(device float* y, constant uint& n, uint i [[thread_position_in_grid]]) {
      float kept[4] = {y[i], y[i + 1], y[i + 2], y[i + 3]};
      y[i] = kept[n];
    }
    """
    file = tmp_path / "pick.metal"
    file.write_text(text)
    assert invoke("lint", file).exit_code == 0
    result = invoke("lint", file, "--registers")
    assert result.exit_code == 1 and f"{file}:3: error: kept is not" in result.output


def test_fit_shows_each_kernel():
    result = invoke("fit", RACE / "missing_barrier.metal")
    assert result.exit_code == 0
    head, line = result.output.splitlines()
    assert head.split()[:3] == ["kernel", "registers", "group"]
    assert line.split()[0] == "reverse" and line.split()[2] == "1024"
    plain = json.loads(invoke("fit", RACE / "missing_barrier.metal", "--json").output)
    assert plain["reverse"]["largest_group"] == 1024


def test_fit_of_what_does_not_compile(tmp_path):
    path = tmp_path / "k.metal"
    path.write_text("kernel void k(device int* x [[buffer(0)]]) { x[0] = y; }\n")
    result = invoke("fit", path)
    assert result.exit_code == 1 and "undeclared identifier 'y'" in result.output


def test_check_tells_what_is_slow(tmp_path):
    path, spec = tmp_path / "k.metal", tmp_path / "k.toml"
    path.write_text(
        "kernel void k(device long* x [[buffer(0)]], constant long& n [[buffer(1)]],\n"
        "              uint i [[thread_position_in_grid]]) { x[i] /= n; }\n"
    )
    spec.write_text(
        'kernel = "k"\nthreads = [32]\ngroup_size = [32]\n[[arguments]]\nshape = [32]\n'
        'dtype = "int64"\nfill = "ones"\n[[arguments]]\nvalue = 3\ntype = "int64"\n'
    )
    result = invoke("check", path, "--spec", spec)
    assert (
        result.exit_code == 1
        and "k.metal:2: error: " in result.output
        and "[division64 in " in result.output
    )
