// SPDX-License-Identifier: MIT
// log(sum(exp(v))) of a row that the threads of a threadgroup share, without overflow.
//
// Exponents count from a finite number, so that minus infinity needs no test.
#pragma once

#include "chunk.h"
#include "reduce.h"

inline float largest(float v) { return v; }
inline float largest(float4 v) { return max(max(v.x, v.y), max(v.z, v.w)); }

// exp(d) for d <= 0, by the one power that is an instruction.
template <typename wide>
inline wide power(wide d) {
  return precise::exp2(d * M_LOG2E_F);
}

// sum(exp(v)) as sum * exp(most), over the values one thread has seen.
struct running_sum {
  float most;
  float sum;

  running_sum() : most(-FLT_MAX), sum(0.0f) {}

  template <typename wide>
  void add(wide v) thread {
    raise(largest(v));
    sum += total(power(v - most));
  }
  // two chunks for one change of `most`
  template <typename wide>
  void add(wide a, wide b) thread {
    raise(largest(max(a, b)));
    sum += total(power(a - most) + power(b - most));
  }
  void raise(float value) thread {
    const float now = max(most, value);
    sum *= power(most - now);
    most = now;
  }
};

// Over the threadgroup, for every thread of it. `scratch` holds 64 floats.
inline float threadgroup_log_sum_exp(
    running_sum mine, threadgroup float* scratch, uint lane, uint lanes) {
  const float most = threadgroup_max(mine.most, scratch, lane, lanes);
  const float sum = mine.sum * power(mine.most - most);
  return most + precise::log(threadgroup_sum(sum, scratch + 32, lane, lanes));
}
