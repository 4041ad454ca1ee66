// SPDX-License-Identifier: MIT
// Numbers as unevaluated sums of two floats: 48 bits of the fraction. From here to the end of a
// file that includes this, no compiler may contract or reorder.
#pragma once

#include <metal_stdlib>
using namespace metal;

#pragma METAL fp math_mode(safe)
#pragma METAL fp contract(off)

struct two_floats {
  float high;
  float low;
};

// x + y without error.
inline two_floats two_sum(float x, float y) {
  const float sum = x + y;
  const float of_y = sum - x;
  return {sum, (x - (sum - of_y)) + (y - of_y)};
}

// The same for |x| >= |y|.
inline two_floats quick_two_sum(float x, float y) {
  const float sum = x + y;
  return {sum, y - (sum - x)};
}

// x y without error.
inline two_floats two_product(float x, float y) {
  const float product = x * y;
  return {product, fma(x, y, -product)};
}

// sum + x y, with the low parts added up apart: `normalised` brings them together.
inline two_floats accumulated(two_floats sum, float x, float y) {
  const two_floats product = two_product(x, y);
  const two_floats next = two_sum(sum.high, product.high);
  return {next.high, sum.low + (next.low + product.low)};
}

inline two_floats normalised(two_floats x) { return two_sum(x.high, x.low); }

inline two_floats added(two_floats x, two_floats y) {
  const two_floats sum = two_sum(x.high, y.high);
  return quick_two_sum(sum.high, sum.low + (x.low + y.low));
}

// x - y z
inline two_floats less_product(two_floats x, two_floats y, two_floats z) {
  const two_floats product = two_product(y.high, z.high);
  return added(x, {-product.high, -(product.low + (y.high * z.low + y.low * z.high))});
}

inline two_floats divided(two_floats x, two_floats y) {
  const float quotient = x.high / y.high;
  const two_floats rest = less_product(x, {quotient, 0.0f}, y);
  return quick_two_sum(quotient, rest.high / y.high);
}

inline two_floats root(two_floats x) {
  const float estimate = precise::sqrt(x.high);
  const two_floats rest = less_product(x, {estimate, 0.0f}, {estimate, 0.0f});
  return quick_two_sum(estimate, rest.high / (2.0f * estimate));
}
