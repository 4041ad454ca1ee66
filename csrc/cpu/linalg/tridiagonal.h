// SPDX-License-Identifier: MIT
// Symmetric matrices side by side, made tridiagonal by reflections from their last row upwards:
// A = Q T Q^T with Q = H_{n-1} ... H_2 and H_i = I - tau_i v_i v_i^T on the first i coordinates.
#pragma once

#include "../common/lanes.h"

namespace metalcore::lanes {

// Makes x[0..m) the v of a reflection that leaves only x[m-1], which becomes the result; v[m-1] is
// 1. What is too small to be squared is dropped: 2^-50 of the largest element, or 2^-100 in double.
template <typename T>
Vec<T> reflector(T* x, int64_t m, Vec<T>& tau) {
  constexpr T kDropped = std::is_same_v<T, double> ? T(0x1p-200) : T(0x1p-100);
  Vec<T> even = {}, odd = {};
  int64_t j = 0;
  for (; j + 2 < m; j += 2) {
    even += at(x, j) * at(x, j);
    odd += at(x, j + 1) * at(x, j + 1);
  }
  if (j + 1 < m) even += at(x, j) * at(x, j);
  const Vec<T> rest = even + odd, alpha = at(x, m - 1);
  const Vec<T> beta = -lanes::copysign(lanes::sqrt(alpha * alpha + rest), alpha);
  const Mask<T> reflects = rest > kDropped;
  tau = reflects ? (beta - alpha) / beta : Vec<T>{};
  const Vec<T> factor = reflects ? splat<T>(1) / (alpha - beta) : Vec<T>{};
  for (j = 0; j + 1 < m; ++j) at(x, j) *= factor;
  at(x, m - 1) = splat<T>(1);
  return reflects ? beta : alpha;
}

// A -= v w^T + w v^T in the lower triangle, rows `row` and, with it, p = A x up to these rows: the
// matrix is read once for both. Without Update only p = A x.
template <typename T, int Rows, bool Update>
inline void update_and_multiply_rows(T* a, int64_t ld, int64_t row, const T* v, const T* w,
                                     const T* x, T* p) {
  Vec<T> vr[Rows], wr[Rows], xr[Rows], sum[Rows] = {};
  T* of[Rows];
  for (int r = 0; r < Rows; ++r) {
    if (Update) {
      vr[r] = at(v, row + r);
      wr[r] = at(w, row + r);
    }
    xr[r] = at(x, row + r);
    of[r] = a + (row + r) * ld * kLanes<T>;
  }
  const auto element = [&](int r, int64_t c, Vec<T> vc, Vec<T> wc) {
    Vec<T> value = at(of[r], c);
    if (Update) {
      value -= vr[r] * wc;
      value -= wr[r] * vc;
      at(of[r], c) = value;
    }
    return value;
  };
  for (int64_t c = 0; c < row; ++c) {
    const Vec<T> vc = Update ? at(v, c) : Vec<T>{}, wc = Update ? at(w, c) : Vec<T>{};
    const Vec<T> xc = at(x, c);
    Vec<T> pc = at(p, c);
    for (int r = 0; r < Rows; ++r) {
      const Vec<T> value = element(r, c, vc, wc);
      sum[r] += value * xc;
      pc += value * xr[r];
    }
    at(p, c) = pc;
  }
  for (int r = 0; r < Rows; ++r) {
    for (int c = 0; c <= r; ++c) {
      const Vec<T> value = element(r, row + c, vr[c], wr[c]);
      sum[r] += value * xr[c];
      if (c < r) sum[c] += value * xr[r];
    }
  }
  for (int r = 0; r < Rows; ++r) at(p, row + r) = sum[r];
}

template <typename T, bool Update>
void update_and_multiply(T* a, int64_t ld, int64_t m, const T* v, const T* w, const T* x, T* p) {
  int64_t row = 0;
  for (; row + 2 <= m; row += 2) update_and_multiply_rows<T, 2, Update>(a, ld, row, v, w, x, p);
  if (row < m) update_and_multiply_rows<T, 1, Update>(a, ld, row, v, w, x, p);
}

// Row i of `a` (lower triangle, rows ld apart) becomes v_i; d and e the diagonals of T. `w` and `p`
// hold n registers each.
template <typename T>
void tridiagonalise(T* a, int64_t n, int64_t ld, T* tau, T* d, T* e, T* w, T* p) {
  const auto row = [&](int64_t i) { return a + i * ld * kLanes<T>; };
  for (int64_t i = n - 1; i >= 0; --i) {
    // the reflection that row i does not show yet
    const int64_t last = std::max<int64_t>(i + 1, 2);
    const T* v = row(last);
    if (last < n) {
      const Vec<T> vi = at(v, i), wi = at(w, i);
      for (int64_t c = 0; c <= i; ++c) at(row(i), c) -= vi * at(w, c) + wi * at(v, c);
    }
    at(d, i) = at(row(i), i);
    if (i == 1) at(e, 0) = at(row(1), 0);
    if (i < 2) continue;
    T* x = row(i);
    Vec<T> t;
    at(e, i - 1) = reflector(x, i, t);
    at(tau, i) = t;
    if (last < n) {
      update_and_multiply<T, true>(a, ld, i, v, w, x, p);
    } else {
      update_and_multiply<T, false>(a, ld, i, v, w, x, p);
    }
    // w = tau A v - tau / 2 (tau v^T A v) v
    Vec<T> dot = {};
    for (int64_t c = 0; c < i; ++c) dot += at(p, c) * at(x, c);
    dot *= t * t * splat<T>(T(0.5));
    for (int64_t c = 0; c < i; ++c) at(w, c) = t * at(p, c) - dot * at(x, c);
  }
}

// Rows first.. of Q into `z`. Each pass takes one reflection away and finds the next one's share.
template <typename T, int Rows>
void rows_of_q(const T* a, int64_t n, int64_t ld, const T* tau, int64_t first, T* z) {
  T* of[Rows];
  Vec<T> share[Rows];
  for (int r = 0; r < Rows; ++r) {
    of[r] = z + (first + r) * ld * kLanes<T>;
    for (int64_t c = 0; c < n; ++c) at(of[r], c) = c == first + r ? splat<T>(1) : Vec<T>{};
    share[r] = first + r < n - 1 ? at(a + (n - 1) * ld * kLanes<T>, first + r) : Vec<T>{};
  }
  for (int64_t i = n - 1; i >= 2; --i) {
    const T *v = a + i * ld * kLanes<T>, *next = v - ld * kLanes<T>;
    const Vec<T> t = at(tau, i);
    Vec<T> sum[Rows] = {};
    for (int r = 0; r < Rows; ++r) share[r] *= t;
    // the reflection after the last one is none, and its share is not used
    for (int64_t c = 0; c + 1 < i; ++c) {
      const Vec<T> vc = at(v, c), nc = at(next, c);
      for (int r = 0; r < Rows; ++r) {
        const Vec<T> value = at(of[r], c) - share[r] * vc;
        at(of[r], c) = value;
        sum[r] += value * nc;
      }
    }
    for (int r = 0; r < Rows; ++r) {
      at(of[r], i - 1) -= share[r];
      share[r] = sum[r];
    }
  }
}

}  // namespace metalcore::lanes
