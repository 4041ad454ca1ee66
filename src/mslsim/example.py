# SPDX-License-Identifier: MIT
"""A kernel with a bug to begin with, and how to launch it."""

from __future__ import annotations

KERNEL = """\
#include <metal_stdlib>
using namespace metal;

kernel void total(device const float* x [[buffer(0)]], device float* sum [[buffer(1)]],
                  uint i [[thread_position_in_threadgroup]]) {
  threadgroup float part[64];
  part[i] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint step = 32; step > 0; step /= 2) {
    if (i < step) part[i] += part[i + step];
  }
  if (i == 0) *sum = part[0];
}
"""
LAUNCH = """\
kernel = "total"
threads = [64]
group_size = [64]

[[arguments]]
name = "x"
shape = [64]
fill = "ones"

[[arguments]]
name = "sum"
shape = [1]
fill = "none"   # not written yet: to read it is a finding
"""
ADVICE = """
Thread 1 writes what thread 0 reads in the same step of the loop. Put
    threadgroup_barrier(mem_flags::mem_threadgroup);
after line 10 of {kernel}, and check again:
    mslsim check {kernel} --spec {launch}"""
