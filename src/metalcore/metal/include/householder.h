// SPDX-License-Identifier: MIT
// Householder reflectors H = I - tau v v^T with v_0 = 1, with LAPACK's signs.
#pragma once

#include <metal_stdlib>
using namespace metal;

// The power of two, from 2^-100 to 2^100, that brings `largest` >= 0 nearest to 1.
inline float power_of_two_for(float largest) {
  const int exponent = int(as_type<uint>(largest) >> 23);
  return as_type<float>(uint(clamp(254 - exponent, 27, 227)) << 23);
}

// What reflects x onto beta e_0: v = x * inverse below its first element. tau is 0 where x is a
// multiple of e_0 already.
struct Reflector {
  float tau;
  float beta;
  float inverse;
};

// From x_0 and the squares of the others, summed up. x is to be of a scale whose squares are
// floats.
inline Reflector reflector_from(float alpha, float tail) {
  if (tail == 0.0f) {
    return {0.0f, alpha, 0.0f};
  }
  const float beta = copysign(precise::sqrt(alpha * alpha + tail), -alpha);
  return {(beta - alpha) / beta, beta, 1.0f / (alpha - beta)};
}
