# SPDX-License-Identifier: MIT
"""simd.h and math.h against scalar code, on every instruction set that this machine executes."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from metalcore import _native

FLAGS = {
    # instruction set: flags, register bytes
    "baseline": ("-march=x86-64", 16),
    "avx2": ("-march=x86-64-v3", 32),
    "avx512": ("-march=x86-64-v4", 64),
    "neon": ("-O2", 16),
}


@pytest.mark.parametrize("file", ["simd", "math"])
@pytest.mark.parametrize("name", _native.usable_sets())
def test_registers_agree_with_scalar_code(name: str, file: str, tmp_path: Path) -> None:
    flag, size = FLAGS[name]
    program = tmp_path / file
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O2", flag, "-ffp-contract=off"]
    command += ["-Wall", "-Wextra", "-Wno-psabi", "-o", str(program)]
    # a shift or sum that C++ leaves undefined ends the program
    command += ["-fsanitize=undefined", "-fno-sanitize-recover=all"]
    include = Path(torch.__file__).parent / "include"
    source = Path(__file__).with_name(f"{file}.cpp")
    subprocess.run([*command, "-isystem", str(include), str(source)], check=True)
    run = subprocess.run([program], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout == f"registers of {size} bytes: right\n"
