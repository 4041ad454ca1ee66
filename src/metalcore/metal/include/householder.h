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

// The columns of a matrix in N lanes from `base` on, while they are factored: rows from some on in
// registers, the others in `factors` [N, N], R on and above the diagonal and the tails of the
// reflectors below it.
template <int N>
struct factored_column {
  threadgroup float* factors;
  int column;
  ushort base;
  float scale;
  float tau;
  float inverse;

  // Steps first..last, of the rows from `first` on in `a`. Each step takes the first of them off,
  // so that registers have the same place in all.
  template <int LENGTH>
  void reflect(thread float* a, int first, int last) thread {
    for (int k = first; k < last; ++k) {
      float tail = 0.0f;
#pragma unroll
      for (int i = 1; i < LENGTH; ++i) {
        tail += a[i] * a[i];
      }
      const Reflector own = reflector_from(a[0], tail);
      const float tau_k = simd_shuffle(own.tau, base + k);
      const float inverse_k = simd_shuffle(own.inverse, base + k);
      float v[LENGTH];
      float dot = a[0];
#pragma unroll
      for (int i = 1; i < LENGTH; ++i) {
        v[i] = simd_shuffle(a[i], base + k) * inverse_k;
        dot += v[i] * a[i];
      }
      const float pull = tau_k * dot;
      tau = column == k ? own.tau : tau;
      const float r = column > k ? a[0] - pull : own.beta;
      factors[k * N + column] = column < k ? a[0] * inverse : r / scale;
      inverse = column == k ? own.inverse : inverse;
#pragma unroll
      for (int i = 1; i < LENGTH; ++i) {
        a[i - 1] = column > k ? a[i] - pull * v[i] : a[i];
      }
      a[LENGTH - 1] = 0.0f;
    }
  }

  // The rows from `first` on, after all steps: R has none there.
  template <int LENGTH>
  void put_rest(thread const float* a, int first) thread {
#pragma unroll
    for (int i = 0; i < LENGTH; ++i) {
      if (first + i < N) {
        factors[(first + i) * N + column] = a[i] * inverse;
      }
    }
  }
};

// A = Q R for a matrix whose columns, times `scale`, stand in N lanes from `base` on, this one's in
// `a`, with zeros past the last row and column: R on and above the diagonal of `factors` [N, N],
// and the tails of the reflectors below it. Returns the tau of the own column.
template <int N>
inline float factor_columns(
    thread float* a, int steps, int column, ushort base, float scale, threadgroup float* factors) {
  factored_column<N> own = {factors, column, base, scale, 0.0f, 0.0f};
  own.template reflect<N>(a, 0, min(steps, N / 2));
  if (steps <= N / 2) {
    own.template put_rest<N>(a, steps);
  } else {
    own.template reflect<N / 2>(a, N / 2, steps);
    own.template put_rest<N / 2>(a, steps);
  }
  return own.tau;
}

// Reflectors first..last, the last one first, to the rows from FIRST on of the column x: the tail
// of v of reflector k is in column k of `factors`.
template <int N, int FIRST>
inline void apply_reflectors(
    thread float* x,
    threadgroup const float* factors,
    float tau_of_column,
    int first,
    int last,
    ushort base) {
  for (int k = last - 1; k >= first; --k) {
    const float tau = simd_shuffle(tau_of_column, base + k);
    float v[N];
    float dot = 0.0f;
#pragma unroll
    for (int i = FIRST; i < N; ++i) {
      const float tail = factors[i * N + k];
      v[i] = i > k ? tail : i == k ? 1.0f : 0.0f;
      dot += v[i] * x[i];
    }
    dot *= tau;
#pragma unroll
    for (int i = FIRST; i < N; ++i) {
      x[i] -= dot * v[i];
    }
  }
}

// x = Q x for the column x of this lane, of the first `steps` reflectors.
template <int N>
inline void apply_q(
    thread float* x,
    threadgroup const float* factors,
    float tau_of_column,
    int steps,
    ushort base) {
  apply_reflectors<N, N / 2>(x, factors, tau_of_column, N / 2, steps, base);
  apply_reflectors<N, 0>(x, factors, tau_of_column, 0, min(steps, N / 2), base);
}
