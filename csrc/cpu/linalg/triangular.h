// SPDX-License-Identifier: MIT
// Triangular systems op(A) X = B, solved in place: X holds B before. Only the triangle of A that
// `Triangle` names is read. A zero on the diagonal gives inf and NaN, as a division does.
//
//   triangular::solve_lanes(a, n, lda, {.lower = true}, x, k, ldx);   // each lane its own A and X
//   triangular::solve_rows(a, n, lda, {.lower = true}, x, k, ldx);    // one A, X row-major
#pragma once

#include "../common/lanes.h"

namespace metalcore::triangular {

using simd::kLanes;
using simd::Vec;

struct Triangle {
  bool lower = true, transpose = false, unit = false;
};

namespace detail {

// Rows and registers of columns that one tile holds: 4 x 3 leaves 16 registers one to spare for an
// element of A and three for the rows of X; NEON and AVX-512 have 32.
constexpr int kRows = 4;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kColumns = 6;
#else
constexpr int kColumns = 3;
#endif

// op(A) as forward substitution reads it: element (i, k) at a[i * row + k * column], row i of X at
// x[i * step]. Back substitution is the same with all strides negative.
template <typename T>
struct Forward {
  const T* a;
  int64_t row, column;
  T* x;
  int64_t step;
  bool unit;
};

// One value for all lanes, or one for each.
template <typename T, bool Shared>
inline Vec<T> element(const T* p) {
  if constexpr (Shared) {
    return lanes::splat<T>(*p);
  } else {
    return simd::load_as<Vec<T>>(p);
  }
}

template <typename T, int C>
inline void divide(Vec<T> (&x)[C], Vec<T> d) {
  if constexpr (C > 1) {
    // a product with 1 / d is as good as a division unless 1 / d leaves the range of T
    constexpr T kLarge = std::is_same_v<T, double> ? T(0x1p1000) : T(0x1p120);
    const auto size = lanes::abs(d);
    if (!lanes::any(~((size < kLarge) & (size > 1 / kLarge)))) {
      const Vec<T> r = T(1) / d;
      for (int j = 0; j < C; ++j) x[j] *= r;
      return;
    }
  }
  for (int j = 0; j < C; ++j) x[j] /= d;
}

// Rows I.. of C registers of columns, from the rows before them.
template <typename T, bool Shared, int R, int C>
inline void solve_tile(const Forward<T>& f, int64_t I, T* x) {
  Vec<T> c[R][C];
  T* rows = x + I * f.step;
  const T* a = f.a + I * f.row;
  for (int i = 0; i < R; ++i) {
    for (int j = 0; j < C; ++j) {
      c[i][j] = simd::load_as<Vec<T>>(rows + i * f.step + j * kLanes<T>);
    }
  }
  const T *before = x, *ak = a;
  for (int64_t k = 0; k < I; ++k, before += f.step, ak += f.column) {
    Vec<T> b[C];
    for (int j = 0; j < C; ++j) b[j] = simd::load_as<Vec<T>>(before + j * kLanes<T>);
    for (int i = 0; i < R; ++i) {
      const Vec<T> v = element<T, Shared>(ak + i * f.row);
      for (int j = 0; j < C; ++j) c[i][j] -= v * b[j];
    }
  }
  for (int i = 0; i < R; ++i) {
    const T* ai = a + i * f.row + I * f.column;
    for (int k = 0; k < i; ++k) {
      const Vec<T> v = element<T, Shared>(ai + k * f.column);
      for (int j = 0; j < C; ++j) c[i][j] -= v * c[k][j];
    }
    if (!f.unit) divide<T, C>(c[i], element<T, Shared>(ai + i * f.column));
    for (int j = 0; j < C; ++j) {
      std::memcpy(rows + i * f.step + j * kLanes<T>, &c[i][j], sizeof(c[i][j]));
    }
  }
}

template <typename T, bool Shared, int C>
void solve_columns(const Forward<T>& f, int64_t n, T* x) {
  int64_t I = 0;
  if constexpr (C == 1) {
    // eight sums hide the latency of one
    for (; I + 8 <= n; I += 8) solve_tile<T, Shared, 8, 1>(f, I, x);
  }
  for (; I + kRows <= n; I += kRows) solve_tile<T, Shared, kRows, C>(f, I, x);
  switch (n - I) {
    case 3:
      return solve_tile<T, Shared, 3, C>(f, I, x);
    case 2:
      return solve_tile<T, Shared, 2, C>(f, I, x);
    case 1:
      return solve_tile<T, Shared, 1, C>(f, I, x);
  }
}

// `registers` of columns, in tiles as even as they go: 4 is 2 + 2 where a tile holds 3.
template <typename T, bool Shared, int C = kColumns>
void solve_registers(const Forward<T>& f, int64_t n, int64_t registers) {
  if constexpr (C > 0) {
    const int64_t tiles = (registers + kColumns - 1) / kColumns;
    int64_t done = 0;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t width = (registers - done + tiles - t - 1) / (tiles - t);
      if (width == C) solve_columns<T, Shared, C>(f, n, f.x + done * kLanes<T>);
      done += width;
    }
    solve_registers<T, Shared, C - 1>(f, n, registers);
  }
}

// `element` and `step`: values from one element of A, and from one row of X, to the next.
template <typename T>
Forward<T> forward(const T* a, int64_t n, int64_t lda, int64_t element, Triangle t, T* x,
                   int64_t step) {
  int64_t row = lda * element, column = element;
  if (t.transpose) std::swap(row, column);
  if (t.lower != t.transpose) return {a, row, column, x, step, t.unit};
  const int64_t last = n - 1;
  return {a + last * (row + column), -row, -column, x + last * step, -step, t.unit};
}

}  // namespace detail

// A [n, lda] and X [n, ldx] registers, one system per lane; k columns of X.
template <typename T>
void solve_lanes(const T* a, int64_t n, int64_t lda, Triangle t, T* x, int64_t k, int64_t ldx) {
  const auto f = detail::forward(a, n, lda, kLanes<T>, t, x, ldx * kLanes<T>);
  detail::solve_registers<T, false>(f, n, k);
}

// One system: X row-major [n, k], its rows ldx apart. `spare` holds n registers, for the columns
// that do not fill one.
template <typename T>
void solve_rows(const T* a, int64_t n, int64_t lda, Triangle t, T* x, int64_t k, int64_t ldx,
                T* spare) {
  constexpr int64_t L = kLanes<T>;
  const auto f = detail::forward(a, n, lda, 1, t, x, ldx);
  detail::solve_registers<T, true>(f, n, k / L);
  const int64_t rest = k % L;
  if (rest == 0) return;
  T* tail = x + k / L * L;
  std::fill(spare, spare + n * L, T(0));
  for (int64_t i = 0; i < n; ++i) std::memcpy(spare + i * L, tail + i * ldx, rest * sizeof(T));
  detail::solve_registers<T, true>(detail::forward(a, n, lda, 1, t, spare, L), n, 1);
  for (int64_t i = 0; i < n; ++i) std::memcpy(tail + i * ldx, spare + i * L, rest * sizeof(T));
}

// The columns of row i that a triangle of order n has.
inline lanes::Part part_of(int64_t i, int64_t n, bool lower) {
  return lower ? lanes::Part{0, i + 1} : lanes::Part{i, n};
}

// The triangle of each of `count` matrices, and what fills registers around it, into w[n][lda].
template <typename T>
void pack_triangle(const T* a, int64_t n, int64_t lda, bool lower, int64_t stride, int64_t count,
                   T* w) {
  lanes::pack_rows(a, n, n, lda, stride, count, [=](int64_t i) { return part_of(i, n, lower); }, w);
}

// The other way; the registers without an element of the triangle become zero.
template <typename T>
void unpack_triangle(const T* w, int64_t n, int64_t lda, bool lower, int64_t stride, int64_t count,
                     T* a) {
  lanes::unpack_rows(
      w, n, n, lda, stride, count, [=](int64_t i) { return part_of(i, n, lower); }, a);
}

}  // namespace metalcore::triangular
