# SPDX-License-Identifier: MIT
"""After an access that misses its memory the kernel goes on: reads give 0, writes are dropped."""

import numpy as np

import mslsim

SOURCE = """#include <metal_stdlib>
using namespace metal;
kernel void far_reads(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                      uint i [[thread_position_in_grid]]) {
  float v = x[i + 3];
  float w = x[i + 100000];
  y[i] = 1 + v + w;
}
kernel void far_writes(device float* x [[buffer(0)]], device float* y [[buffer(1)]],
                       uint i [[thread_position_in_grid]]) {
  x[i + 5000] = 7;
  y[i] = x[i + 5001];
  ((device float4*)x)[i] = 2;
}
kernel void own_array(device float* y [[buffer(0)]], constant int* at [[buffer(1)]],
                      uint i [[thread_position_in_grid]]) {
  threadgroup float shared[32];
  int own[4] = {0};
  own[at[i]] = 1;
  shared[i] = own[0] + own[1] + own[2] + own[3];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = shared[i] + simd_sum(1.0f);
}
"""


def run(kernel, *args, threads=32):
    library = mslsim.compile_shader(SOURCE, on_finding="collect")
    return library[kernel](*args, threads=threads, group_size=32).findings


def test_reads_give_zero_and_every_line_is_told():
    x, y = np.ones(32, np.float32), np.zeros(32, np.float32)
    findings = run("far_reads", x, y)
    assert [(f.kind, f.line) for f in findings] == [("bounds", 6), ("bounds", 5)]
    assert "at byte 400000 (index 100000) of x [[buffer(0)]] of 128 bytes" in findings[0].message
    assert y.tolist() == [2.0] * 29 + [1.0] * 3


def test_writes_are_dropped():
    x, y = np.zeros(34, np.float32), np.ones(8, np.float32)
    findings = run("far_writes", x, y, threads=8)
    assert {(f.kind, f.line) for f in findings} == {("bounds", 11), ("bounds", 12)}
    assert y.tolist() == [0.0] * 8
    x, y = np.zeros(30, np.float32), np.ones(8, np.float32)
    assert {f.line for f in run("far_writes", x, y, threads=8)} == {11, 12, 13}
    assert x.tolist() == [2.0] * 28 + [0.0] * 2


def test_an_index_outside_a_threads_array_ends_that_thread_alone():
    y, at = np.zeros(32, np.float32), np.arange(32, dtype=np.int32) % 4
    at[[3, 20]] = 4, -1
    findings = run("own_array", y, at)
    message = "index 4 is outside own[4], by thread 3 of threadgroup 0, which ends here"
    assert [(f.kind, f.line, f.message) for f in findings] == [("bounds", 19, message)]
    assert y.tolist() == [0.0 if i in (3, 20) else 31.0 for i in range(32)]


def test_the_next_launch_starts_afresh():
    x, y = np.zeros(32, np.float32), np.ones(8, np.float32)
    run("far_writes", x, y, threads=8)
    z = np.zeros(32, np.float32)
    run("far_reads", x, z)
    assert z.tolist() == [3.0] * 29 + [1.0] * 3
