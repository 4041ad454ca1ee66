// SPDX-License-Identifier: MIT
// Tensors read one value or four at a time.
#pragma once

#include <metal_stdlib>
using namespace metal;

// WIDTH consecutive values of a row: as they are stored, and as floats.
template <typename T, int WIDTH>
struct chunk {
  typedef vec<T, WIDTH> stored;
  typedef vec<float, WIDTH> wide;
};

template <typename T>
struct chunk<T, 1> {
  typedef T stored;
  typedef float wide;
};

inline float total(float v) { return v; }
inline float total(float4 v) { return (v.x + v.y) + (v.z + v.w); }

// The sum of the squares.
inline float squared(float v) { return v * v; }
inline float squared(float4 v) { return fma(v.x, v.x, v.y * v.y) + fma(v.z, v.z, v.w * v.w); }
