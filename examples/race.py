# SPDX-License-Identifier: MIT
"""A Metal kernel with a race, found and fixed on any machine: python examples/race.py"""

import numpy as np

import mslsim

SOURCE = """
#include <metal_stdlib>
using namespace metal;

kernel void total(device const float* x [[buffer(0)]], device float* sum [[buffer(1)]],
                  uint i [[thread_position_in_threadgroup]]) {
  threadgroup float part[64];
  part[i] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint step = 32; step > 0; step /= 2) {
    if (i < step) part[i] += part[i + step];
    BARRIER
  }
  if (i == 0) *sum = part[0];
}
"""
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def main() -> tuple[int, int]:
    counts = []
    for name, line in (("without the barrier", ""), ("with it", BARRIER)):
        x, total = np.ones(64, np.float32), np.zeros(1, np.float32)
        source = SOURCE.replace("BARRIER", line)
        report = mslsim.run(source, "total", [x, total], threads=64, group_size=64)
        print(f"{name}: {len(report.findings)} findings, sum {total[0]:.0f}")
        for finding in report.findings[:1]:
            print(finding)
        counts.append(len(report.findings))
    return counts[0], counts[1]


if __name__ == "__main__":
    main()
