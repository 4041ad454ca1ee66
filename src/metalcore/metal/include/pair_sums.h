// SPDX-License-Identifier: MIT
// Sums of two floats each over a threadgroup, and their quotients and roots.
#pragma once

#include "float_pairs.h"

// What is not finite has a NaN in its low part.
inline float value_of(two_floats x) { return isfinite(x.low) ? x.high + x.low : x.high; }

// sum + x, for sums whose parts may overlap.
inline two_floats with_term(two_floats sum, float x) {
  const two_floats next = two_sum(sum.high, x);
  return {next.high, sum.low + next.low};
}

inline two_floats with_pair(two_floats sum, two_floats x) {
  const two_floats next = two_sum(sum.high, x.high);
  return {next.high, sum.low + x.low + next.low};
}

// A whole number as the sum of two floats.
inline two_floats as_pair(uint n) {
  const uint high = n & 0xffff0000;
  return {float(high), float(n - high)};
}

inline float quotient_of(two_floats x, uint n) {
  const two_floats size = normalised(as_pair(n));
  const two_floats sum = normalised(x);
  const float found = value_of(divided(sum, size));
  return isfinite(found) ? found : value_of(x) / float(n);
}

inline float root_of(two_floats x) {
  const two_floats sum = normalised(x);
  const float estimate = precise::sqrt(value_of(x));
  return estimate > 0.0f && isfinite(estimate) ? value_of(root(sum)) : estimate;
}
