// SPDX-License-Identifier: MIT
// What kernels of rows share beside sums: the largest value of a row.
#pragma once

#include "elementwise.h"
#include "reduce.h"

inline float largest(float v) { return v; }
inline float largest(float4 v) { return max(max(v.x, v.y), max(v.z, v.w)); }

// The largest `value` of the threads that share a row, for each of them, as threadgroup_sum.
inline float row_max(float value, threadgroup float* scratch, uint lane, uint lanes) {
  value = simd_max(value);
  if (lanes > 32) {
    if (lane % 32 == 0) {
      scratch[lane / 32] = value;
    }
    // every simdgroup's maximum is in scratch
    threadgroup_barrier(mem_flags::mem_threadgroup);
    value = simd_max(lane % 32 < lanes / 32 ? scratch[lane % 32] : -INFINITY);
  }
  return value;
}
