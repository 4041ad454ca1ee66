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

// A = Q R for a matrix whose columns stand in N lanes from `base` on, this one's in `a`: R on and
// above the diagonal and the tails of the reflectors below it. Returns the tau of the own column.
template <int N>
inline float factor_columns(thread float* a, int steps, int column, ushort base) {
  float tau_of_column = 0.0f;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (k < steps) {
      float tail = 0.0f;
#pragma unroll
      for (int i = k + 1; i < N; ++i) {
        tail += a[i] * a[i];
      }
      const Reflector own = reflector_from(a[k], tail);
      const float tau = simd_shuffle(own.tau, base + k);
      const float inverse = simd_shuffle(own.inverse, base + k);
      float v[N];
      float dot = a[k];
#pragma unroll
      for (int i = k + 1; i < N; ++i) {
        v[i] = simd_shuffle(a[i], base + k) * inverse;
        dot += v[i] * a[i];
      }
      if (column > k) {
        a[k] -= tau * dot;
      }
#pragma unroll
      for (int i = k + 1; i < N; ++i) {
        a[i] = column > k ? a[i] - tau * dot * v[i] : column == k ? v[i] : a[i];
      }
      if (column == k) {
        a[k] = own.beta;
        tau_of_column = tau;
      }
    }
  }
  return tau_of_column;
}

// x = x - tau v (v^T x) for the column x of this lane, v = e_k and the given tail.
template <int N>
inline void reflect_column(thread float* x, thread const float* v, float tau, int k) {
  float dot = x[k];
#pragma unroll
  for (int i = k + 1; i < N; ++i) {
    dot += v[i] * x[i];
  }
  x[k] -= tau * dot;
#pragma unroll
  for (int i = k + 1; i < N; ++i) {
    x[i] -= tau * dot * v[i];
  }
}
