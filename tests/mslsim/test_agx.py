# SPDX-License-Identifier: MIT
"""The way to Mesa's compiler, with programs in its place that pass on what they are given."""

import re

import pytest

import mslsim
from mslsim import agx

SOURCE = """#include <metal_stdlib>
using namespace metal;
kernel void total(device const half* x [[buffer(0)]], constant uint& n [[buffer(1)]],
                  device float* y [[buffer(2)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float shared[32];
  shared[i / 32] = simd_sum(float(x[i]) * exp(float(n)));
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = shared[0];
}
"""
SAID = "SHADER-DB: shader: 90 inst, 70 alu, 70 fscib, 9 ic, 640 bytes, 121 regs, 8 uniforms,"
SAID += " 0 scratch, 832 threads, 1 loops, 3:5 spills:fills"


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Writes a program of each name, by default one that passes on its input."""

    def write(name, script="cat"):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    for name in ("clang++-19", "opt-19", "llvm-spirv-19"):
        write(name)
    write("asahi_clc", f"cp $1 {tmp_path}/given\necho '{SAID}'")
    monkeypatch.setenv("MSLSIM_AGX", str(tmp_path / "asahi_clc"))
    return write


def test_the_figures_of_the_compiler_take_the_place_of_estimates(tools, tmp_path):
    fit = mslsim.fits(SOURCE)["total"]
    assert (fit.half_registers, fit.code_bytes, fit.spills) == (121, 640, 3)
    assert (fit.largest_group, fit.source) == (832, "asahi_clc")
    given = (tmp_path / "given").read_text()
    spaces = re.findall(r"address_space\((\d)\)\)\) char\* (\w+)", given)
    assert spaces == [("1", "buffer0"), ("2", "buffer1"), ("1", "buffer2")]
    assert "get_local_id(0)" in given and "msl_table" not in given.split("KERNEL")[0][-3000:]


def test_a_kernel_that_a_tool_does_not_take_is_estimated(tools):
    tools("llvm-spirv-19", "echo no such thing >&2; exit 3")
    fit = mslsim.fits(SOURCE)["total"]
    assert fit.source == "estimate, because of llvm-spirv: no such thing"
    assert fit.largest_group == 1024


def test_what_is_no_program_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("MSLSIM_AGX", str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="should be the path of asahi_clc"):
        mslsim.fits(SOURCE)


CALLS = {
    "@_ZN5metal16msl_serve_reduceIfNS_7msl_addELi32EEEvPN3msl10CollectiveE": "reduce_f1",
    "@_ZN5metal17msl_serve_shuffleINS_3vecIDF16_Li4EEELb0EEEvPN3msl10CollectiveE": "shuffle_h4",
    "@_ZN5metal15msl_serve_firstIjEEvPN3msl10CollectiveE": "shuffle_i1",
    "@_ZN5metal18msl_serve_multiplyIfDF16_DF16_fEEvPN3msl10CollectiveE": "multiply_fh",
    "@_ZN5metal18msl_serve_multiplyIffffEEvPN3msl10CollectiveE": "multiply_ff",
    "@_ZN5metal16msl_serve_ballotEPN3msl10CollectiveE": "ballot",
    "@_ZN5metal17msl_serve_nothingEPN3msl10CollectiveE": "nothing",
}


@pytest.mark.parametrize(("served", "name"), CALLS.items())
def test_collectives_become_functions_of_opencl(served, name):
    call = (
        "  call spir_func void @msl_collective(ptr noundef nonnull %p, i32 noundef %n, "
        f"ptr noundef nonnull {served}, i32 noundef 2, i32 noundef 0) #7"
    )
    expected = f"  call spir_func void @msl_agx_{name}(ptr %p, i32 %n) #7"
    assert agx._replaced(call) == expected


def test_threadgroup_memory_becomes_a_variable():
    call = (
        "  %c = tail call spir_func noundef nonnull align 4 dereferenceable(128) ptr "
        "@msl_threadgroup_memory(i32 noundef 1, i64 noundef 128, i64 noundef 4) #8, !dbg !3\n"
    )
    assert agx._replaced(call).splitlines() == [
        "  %c = addrspacecast ptr addrspace(3) @msl_shared_1 to ptr",
        "@msl_shared_1 = internal addrspace(3) global [128 x i8] undef, align 4",
    ]
