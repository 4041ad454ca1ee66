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

// Of two values at a time, with 32 floats, for at most 512 threads: a lane adds up one of them.
inline float2 threadgroup_sum(float2 value, threadgroup float* scratch, uint lane, uint lanes) {
  const bool is_odd = lane % 2 != 0;
  float mine = is_odd ? value.y : value.x;
  mine += simd_shuffle_xor(is_odd ? value.x : value.y, 1);
#pragma unroll
  for (ushort step = 2; step < 32; step *= 2) {
    mine += simd_shuffle_xor(mine, step);
  }
  if (lanes <= 32) {
    return float2(simd_broadcast(mine, 0), simd_broadcast(mine, 1));
  }
  if (lane % 32 < 2) {
    scratch[lane % 2 * 16 + lane / 32] = mine;
  }
  // every simdgroup's values are in scratch
  threadgroup_barrier(mem_flags::mem_threadgroup);
  mine = lane % 16 < lanes / 32 ? scratch[lane % 32] : 0.0f;
#pragma unroll
  for (ushort step = 1; step < 16; step *= 2) {
    mine += simd_shuffle_xor(mine, step);
  }
  return float2(simd_broadcast(mine, 0), simd_broadcast(mine, 16));
}

// The largest `value`, in the same way.
inline float threadgroup_max(float value, threadgroup float* scratch, uint lane, uint lanes) {
  return threadgroup_value<max_of>(value, scratch, lane, lanes);
}
