// SPDX-License-Identifier: MIT
// log(sum(exp(v))) of a row that the threads of a threadgroup share, without overflow.
#pragma once

#include "chunk.h"
#include "reduce.h"

inline float largest(float v) { return v; }
inline float largest(float4 v) { return max(max(v.x, v.y), max(v.z, v.w)); }

// Where exponents count from: 0 while there is nothing but minus infinity.
inline float origin(float most) { return most == -INFINITY ? 0.0f : most; }

// sum(exp(v)) as sum * exp(most), over the values one thread has seen.
struct running_sum {
  float most;
  float sum;

  running_sum() : most(-INFINITY), sum(0.0f) {}

  template <typename wide>
  void add(wide v) thread {
    const float now = max(most, largest(v));
    sum = sum * precise::exp(most - origin(now)) + total(precise::exp(v - origin(now)));
    most = now;
  }
};

// Over the threadgroup, for every thread of it. `scratch` holds 64 floats.
inline float threadgroup_log_sum_exp(
    running_sum mine, threadgroup float* scratch, uint lane, uint lanes) {
  const float most = threadgroup_max(mine.most, scratch, lane, lanes);
  const float sum = mine.sum * precise::exp(mine.most - origin(most));
  return most + precise::log(threadgroup_sum(sum, scratch + 32, lane, lanes));
}
