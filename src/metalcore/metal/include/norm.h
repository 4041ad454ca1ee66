// SPDX-License-Identifier: MIT
// What norms share: rows read one value or four at a time, and their scale.
#pragma once

#include "reduce.h"

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

// offset + weight[i], or 1 where there is no weight.
template <typename wide, typename stored>
inline wide scale_at(device const stored* weight, long has_weight, float offset, long i) {
  return has_weight != 0 ? wide(weight[i]) + offset : wide(1.0f);
}
