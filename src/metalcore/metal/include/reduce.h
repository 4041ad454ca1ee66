// SPDX-License-Identifier: MIT
// Sums and maxima over the threads of a threadgroup.
#pragma once

#include <metal_stdlib>
using namespace metal;

struct sum_of {
  static float lanes(float value) { return simd_sum(value); }
  static float2 lanes(float2 v) { return float2(simd_sum(v.x), simd_sum(v.y)); }
  static float none() { return 0.0f; }
};

struct max_of {
  static float lanes(float value) { return simd_max(value); }
  static float none() { return -INFINITY; }
};

// One value of a simdgroup, or two, 32 floats apart.
inline void put(threadgroup float* scratch, uint i, float v) { scratch[i] = v; }
inline void put(threadgroup float* scratch, uint i, float2 v) {
  scratch[i] = v.x;
  scratch[i + 32] = v.y;
}
inline float got(threadgroup float* scratch, uint i, float) { return scratch[i]; }
inline float2 got(threadgroup float* scratch, uint i, float2) {
  return float2(scratch[i], scratch[i + 32]);
}

template <typename Of, typename V>
inline V threadgroup_value(V value, threadgroup float* scratch, uint lane, uint lanes) {
  value = Of::lanes(value);
  if (lanes > 32) {
    if (lane % 32 == 0) {
      put(scratch, lane / 32, value);
    }
    // every simdgroup's value is in scratch
    threadgroup_barrier(mem_flags::mem_threadgroup);
    value = Of::lanes(lane % 32 < lanes / 32 ? got(scratch, lane % 32, value) : V(Of::none()));
  }
  return value;
}

// Sum of `value` over the threadgroup, for every thread of it. `scratch` holds 32 floats and must
// not be in use; one barrier. `lanes`, the size of the threadgroup, is a multiple of 32.
inline float threadgroup_sum(float value, threadgroup float* scratch, uint lane, uint lanes) {
  return threadgroup_value<sum_of>(value, scratch, lane, lanes);
}

// Of two values, with 64 floats.
inline float2 threadgroup_sum(float2 value, threadgroup float* scratch, uint lane, uint lanes) {
  return threadgroup_value<sum_of>(value, scratch, lane, lanes);
}

// The largest `value`, in the same way.
inline float threadgroup_max(float value, threadgroup float* scratch, uint lane, uint lanes) {
  return threadgroup_value<max_of>(value, scratch, lane, lanes);
}
