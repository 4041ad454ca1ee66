// SPDX-License-Identifier: MIT
// log sigmoid(x), which keeps its digits at both ends.
#pragma once

#include <metal_stdlib>
using namespace metal;

// log(1 + y) for y from 0 to 1: what rounding takes from 1 + y is taken from its logarithm too.
inline float log_of_one_plus(float y) {
  const float u = 1.0f + y;
  return u == 1.0f ? y : precise::log(u) * (y / (u - 1.0f));
}

inline float log_sigmoid(float x) { return min(x, 0.0f) - log_of_one_plus(precise::exp(-abs(x))); }
