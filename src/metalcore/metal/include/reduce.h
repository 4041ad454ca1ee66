// SPDX-License-Identifier: MIT
// Sums over the threads of a threadgroup.
#pragma once

#include <metal_stdlib>
using namespace metal;

// Sum of `value` over the threadgroup, for every thread of it. `scratch` holds 32 floats and must
// not be in use; one barrier. `lanes`, the size of the threadgroup, is a multiple of 32.
inline float threadgroup_sum(float value, threadgroup float* scratch, uint lane, uint lanes) {
  value = simd_sum(value);
  if (lanes > 32) {
    if (lane % 32 == 0) {
      scratch[lane / 32] = value;
    }
    // every simdgroup's sum is in scratch
    threadgroup_barrier(mem_flags::mem_threadgroup);
    value = simd_sum(lane % 32 < lanes / 32 ? scratch[lane % 32] : 0.0f);
  }
  return value;
}
