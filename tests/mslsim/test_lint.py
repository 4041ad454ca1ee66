# SPDX-License-Identifier: MIT
"""What lint says of a source, without running it."""

import numpy as np
import pytest

import mslsim

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
# Reads an array in a loop up to one bound, and then by another index.
KEPT = (
    HEAD
    + """
inline float at(thread const float* x, uint i) { return x[i]; }

template <int N>
kernel void sums(device float* y [[buffer(0)]], constant uint& n [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) {
  float kept[N];
#pragma unroll
  for (int k = 0; k < N; ++k) {
    kept[k] = y[i + 8 * k];
  }
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < %s; ++k) {
    sum += kept[k] * sum;
  }
  y[i] = sum + at(kept, %s);
}

template [[host_name("sums_8")]] [[kernel]] decltype(sums<8>) sums<8>;
template [[host_name("sums_40")]] [[kernel]] decltype(sums<40>) sums<40>;
"""
)


def test_lint_does_not_run_anything():
    assert mslsim.lint(KEPT % ("N", "3")) == []
    findings = mslsim.lint(HEAD + "float count;\n")
    assert [(f.kind, f.line) for f in findings] == [("strict", 3)]
    assert mslsim.lint(HEAD + "float count;\n", strict=False) == []


def test_arrays_with_constant_indices_are_in_registers():
    assert mslsim.lint(KEPT % ("N", "3"), registers=True) == []


def test_arrays_that_cannot_be_in_registers_are_found():
    for text in (KEPT % ("int(n)", "3"), KEPT % ("N", "n")):
        assert mslsim.lint(text) == []
        found = mslsim.lint(text, registers=True, name="sums.metal")
        line = text.splitlines().index("  float kept[N];") + 1
        assert [(f.kind, f.kernel, f.file, f.line) for f in found] == [
            ("registers", "sums_8", "sums.metal", line),
            ("registers", "sums_40", "sums.metal", line),
        ]
        assert all(f.message.startswith("kept is not in registers") for f in found)


def test_errors_come_before_registers():
    found = mslsim.lint(KEPT % ("missing", "3"), registers=True)
    assert {f.kind for f in found} == {"compile"}


TWO = """#include <metal_stdlib>
using namespace metal;
kernel void good(device float* x [[buffer(0)]]) { x[0] = 1; }
kernel void bad(device float* x [[buffer(0)]]) { x[0] = missing; }
template <typename T> void wider(device T* x) { x[0] = T::none; }
template <typename T> kernel void maybe(device T* x [[buffer(0)]]) { wider(x); }
template [[host_name("maybe_float")]] kernel void maybe<float>(device float*);
"""


def test_one_bad_kernel_costs_one_kernel():
    library = mslsim.compile_shader(TWO)
    x = np.zeros(1, np.float32)
    library.good(x, threads=1, group_size=1)
    assert x[0] == 1
    for name in ("bad", "maybe_float"):
        with pytest.raises(mslsim.CompileError):
            library[name](x, threads=1, group_size=1)


def test_errors_name_kernel_line_and_column():
    found = {f.line: f for f in mslsim.lint(TWO, name="two.metal")}
    assert found[4].diagnostic == (
        "two.metal:4:57: error: use of undeclared identifier 'missing' [compile in bad]"
    )
    assert set(found) == {4, 5}


def test_files_outside_of_the_folders_given_are_not_read(tmp_path):
    (tmp_path / "secret.h").write_text("constant int secret = 7;\n")
    (tmp_path / "kernels").mkdir()
    text = '#include "../secret.h"\nkernel void k(device int* x [[buffer(0)]]) { x[0] = secret; }\n'
    inside, outside = [str(tmp_path)], [str(tmp_path / "kernels")]
    (finding,) = mslsim.lint(text, include=outside)
    assert finding.kind == "strict" and "in no folder given" in finding.message
    assert mslsim.lint(text.replace("../", ""), include=inside) == []
