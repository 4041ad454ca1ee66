// SPDX-License-Identifier: MIT
// Householder reflectors H = I - tau v v^T with v_0 = 1, one per lane, with LAPACK's signs.
//
// Vectors and matrices stand in a workspace of lanes.h and are given by the distance between their
// elements, so that the same code reflects from the left and from the right.
#pragma once

#include "../common/lanes.h"

namespace metalcore::lanes {

// Sum of x_i y_i. Four chains hide the latency of an addition.
template <typename T>
inline Vec<T> dot(const T* x, int64_t x_step, const T* y, int64_t y_step, int64_t count) {
  Vec<T> s[4] = {};
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    for (int64_t c = 0; c < 4; ++c) s[c] += at(x, (i + c) * x_step) * at(y, (i + c) * y_step);
  }
  for (; i < count; ++i) s[0] += at(x, i * x_step) * at(y, i * y_step);
  return (s[0] + s[1]) + (s[2] + s[3]);
}

// The power of two that brings `largest` to about 1; 1 for zero, infinity and NaN.
template <typename T>
inline Vec<T> power_of_two_for(Vec<T> largest) {
  constexpr Int<T> kMantissa = sizeof(T) == 8 ? 52 : 23, kBias = sizeof(T) == 8 ? 1023 : 127;
  const Mask<T> exponent = simd::bits_as<Mask<T>>(largest) >> kMantissa;
  const Mask<T> wanted = 2 * kBias - exponent;
  // the reciprocal of the largest powers is not a normal number
  const Mask<T> normal = wanted < 1 ? Mask<T>{} + 1 : wanted;
  const Mask<T> plain = (largest > 0) & (exponent <= 2 * kBias);
  return plain ? simd::bits_as<Vec<T>>(normal << kMantissa) : splat<T>(1);
}

// What reflects x onto a multiple of e_0: v = x * scale * inverse below its first element, and beta
// the multiple. tau is 0 where x is such a multiple already.
template <typename T>
struct Reflector {
  Vec<T> tau, beta, scale, inverse;
};

template <typename T>
inline Reflector<T> reflector_from(Vec<T> alpha, Vec<T> tail, Vec<T> scale, Mask<T> is_zero) {
  const Vec<T> norm = lanes::sqrt(alpha * alpha + tail);
  const Vec<T> beta = lanes::copysign(norm, -alpha);
  const Vec<T> tau = (beta - alpha) / beta, inverse = splat<T>(1) / (alpha - beta);
  return {is_zero ? Vec<T>{} : tau, is_zero ? alpha / scale : beta / scale, scale,
          is_zero ? Vec<T>{} : inverse};
}

// Where squares would over- or underflow, x is brought to about 1 first, by powers of two: lanes
// that do not need it get the same bits either way.
template <typename T>
inline Reflector<T> find_reflector(const T* x, int64_t step, int64_t count) {
  constexpr T kSmall = sizeof(T) == 8 ? 0x1p-900 : 0x1p-80f;
  constexpr T kLarge = sizeof(T) == 8 ? 0x1p500 : 0x1p60f;
  const Vec<T> alpha = at(x, 0);
  const T* tail = x + step * kLanes<T>;
  const Vec<T> squares = dot(tail, step, tail, step, count - 1);
  const Mask<T> safe =
      (squares > kSmall) & (squares < kLarge * kLarge) & (lanes::abs(alpha) < kLarge);
  if (!any(~safe)) return reflector_from<T>(alpha, squares, splat<T>(1), Mask<T>{});

  Vec<T> largest = {};
  Mask<T> is_zero = Mask<T>{} - 1;
  for (int64_t i = 0; i < count - 1; ++i) {
    largest = lanes::max(lanes::abs(at(tail, i * step)), largest);
    is_zero &= at(tail, i * step) == 0;
  }
  const Vec<T> scale = power_of_two_for<T>(lanes::max(lanes::abs(alpha), largest));
  Vec<T> sum = {};
  for (int64_t i = 0; i < count - 1; ++i) {
    const Vec<T> scaled = at(tail, i * step) * scale;
    sum += scaled * scaled;
  }
  const Vec<T> one = splat<T>(1);
  const Vec<T> used = safe ? one : scale;
  return reflector_from<T>(alpha * used, safe ? squares : sum, used, is_zero);
}

// Puts beta in the place of x_0 and v in that of the rest; returns tau.
template <typename T>
inline Vec<T> reflect(T* x, int64_t step, int64_t count) {
  const Reflector<T> h = find_reflector(x, step, count);
  at(x, 0) = h.beta;
  for (int64_t i = 1; i < count; ++i) at(x, i * step) = at(x, i * step) * h.scale * h.inverse;
  return h.tau;
}

// I - V T V^T for one or two reflectors: column p of V has its 1 in row p, zeros above it and
// v[(i * row + p * column)] below. T is upper triangular.
template <typename T, int P>
struct Reflectors {
  const T* v;
  int64_t row, column;
  Vec<T> tau[P];
  // T's element above the diagonal, for two: -tau_0 tau_1 v_0^T v_1
  Vec<T> above;
};

// V^T A for C columns of A, of which only the rows from P on are read where the head is zero.
template <bool kZeroHead, typename T, int P, int C>
inline void project(const Reflectors<T, P>& h, const T* a, int64_t row, int64_t column,
                    int64_t rows, Vec<T> w[P][C]) {
  for (int p = 0; p < P; ++p) {
    for (int c = 0; c < C; ++c) {
      w[p][c] = Vec<T>{};
      if (!kZeroHead) {
        w[p][c] = at(a, p * row + c * column);
        for (int i = p + 1; i < P; ++i) {
          w[p][c] += at(h.v, i * h.row + p * h.column) * at(a, i * row + c * column);
        }
      }
    }
  }
  for (int64_t i = P; i < rows; ++i) {
    Vec<T> v[P];
    for (int p = 0; p < P; ++p) v[p] = at(h.v, i * h.row + p * h.column);
    for (int c = 0; c < C; ++c) {
      const Vec<T> x = at(a, i * row + c * column);
      for (int p = 0; p < P; ++p) w[p][c] += v[p] * x;
    }
  }
}

// A - V y, where a zero head of A is not read.
template <bool kZeroHead, typename T, int P, int C>
inline void subtract(const Reflectors<T, P>& h, const Vec<T> y[P][C], T* a, int64_t row,
                     int64_t column, int64_t rows) {
  for (int i = 0; i < P; ++i) {
    for (int c = 0; c < C; ++c) {
      Vec<T> x = (kZeroHead ? Vec<T>{} : at(a, i * row + c * column)) - y[i][c];
      for (int p = 0; p < i; ++p) x -= at(h.v, i * h.row + p * h.column) * y[p][c];
      at(a, i * row + c * column) = x;
    }
  }
  for (int64_t i = P; i < rows; ++i) {
    Vec<T> v[P];
    for (int p = 0; p < P; ++p) v[p] = at(h.v, i * h.row + p * h.column);
    for (int c = 0; c < C; ++c) {
      Vec<T> x = at(a, i * row + c * column);
      for (int p = 0; p < P; ++p) x -= v[p] * y[p][c];
      at(a, i * row + c * column) = x;
    }
  }
}

// A tile of C columns: (I - V T V^T) A, or with `kTransposed` (I - V T^T V^T) A.
template <bool kTransposed, bool kZeroHead, int C, typename T, int P>
inline void apply_to_tile(const Reflectors<T, P>& h, T* a, int64_t row, int64_t column,
                          int64_t rows) {
  Vec<T> w[P][C], y[P][C];
  project<kZeroHead, T, P, C>(h, a, row, column, rows, w);
  for (int c = 0; c < C; ++c) {
    for (int p = 0; p < P; ++p) y[p][c] = h.tau[p] * w[p][c];
    if constexpr (P == 2) {
      if (kTransposed) {
        y[1][c] += h.above * w[0][c];
      } else {
        y[0][c] += h.above * w[1][c];
      }
    }
  }
  subtract<kZeroHead, T, P, C>(h, y, a, row, column, rows);
}

// The same for any number of columns. Four at a time: their sums and two of V fit 16 registers.
template <bool kTransposed, bool kZeroHead = false, typename T, int P>
inline void apply_left(const Reflectors<T, P>& h, T* a, int64_t row, int64_t column, int64_t rows,
                       int64_t columns) {
  int64_t j = 0;
  for (; j + 4 <= columns; j += 4) {
    apply_to_tile<kTransposed, kZeroHead, 4>(h, a + j * column * kLanes<T>, row, column, rows);
  }
  T* rest = a + j * column * kLanes<T>;
  if (columns - j == 3) apply_to_tile<kTransposed, kZeroHead, 3>(h, rest, row, column, rows);
  if (columns - j == 2) apply_to_tile<kTransposed, kZeroHead, 2>(h, rest, row, column, rows);
  if (columns - j == 1) apply_to_tile<kTransposed, kZeroHead, 1>(h, rest, row, column, rows);
}

}  // namespace metalcore::lanes
