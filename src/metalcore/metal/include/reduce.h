// SPDX-License-Identifier: MIT
// Sums and maxima over the threads of a threadgroup.
#pragma once

#include <metal_stdlib>
using namespace metal;

struct sum_of {
  static float lanes(float value) { return simd_sum(value); }
  static float none() { return 0.0f; }
};

struct max_of {
  static float lanes(float value) { return simd_max(value); }
  static float none() { return -INFINITY; }
};

template <typename Of>
inline float threadgroup_value(float value, threadgroup float* scratch, uint lane, uint lanes) {
  value = Of::lanes(value);
  if (lanes > 32) {
    if (lane % 32 == 0) {
      scratch[lane / 32] = value;
    }
    // every simdgroup's value is in scratch
    threadgroup_barrier(mem_flags::mem_threadgroup);
    value = Of::lanes(lane % 32 < lanes / 32 ? scratch[lane % 32] : Of::none());
  }
  return value;
}

// Sum of `value` over the threadgroup, for every thread of it. `scratch` holds 32 floats and must
// not be in use; one barrier. `lanes`, the size of the threadgroup, is a multiple of 32.
inline float threadgroup_sum(float value, threadgroup float* scratch, uint lane, uint lanes) {
  return threadgroup_value<sum_of>(value, scratch, lane, lanes);
}

// The largest `value`, in the same way.
inline float threadgroup_max(float value, threadgroup float* scratch, uint lane, uint lanes) {
  return threadgroup_value<max_of>(value, scratch, lane, lanes);
}
