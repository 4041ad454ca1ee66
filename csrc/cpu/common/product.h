// SPDX-License-Identifier: MIT
// Products of small matrices: C[m][n] (+)= sum over k of A[m][k] * B[k][n].
//
// One micro-kernel keeps kRows x kVectors registers of C. Rows of B fill registers; values of A are
// broadcast from memory, at any two strides, so A is never packed or transposed: keys and values
// of attention, weights and their transposes are read where they are.
#pragma once

#include "lanes.h"

namespace metalcore::product {

using simd::kLanes;
using simd::Vec;

// Rows of A and registers of a row of B: as many as the instruction set has registers for.
#if defined(__AVX512F__)
constexpr int kRows = 8, kVectors = 2;
#elif defined(__aarch64__)
constexpr int kRows = 8, kVectors = 3;
#else
constexpr int kRows = 4, kVectors = 3;
#endif

// Columns that multiply() computes at once.
template <typename A>
constexpr int64_t kWidth = kVectors * kLanes<A>;

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Where A[m][k] stands: values + m * row + k * column.
template <typename A>
struct Broadcast {
  const A* values;
  int64_t row, column;

  Broadcast from_row(int64_t m) const { return {values + m * row, row, column}; }
};

// Rows of B or C, `row` apart.
template <typename A>
struct Lines {
  A* values;
  int64_t row;

  Lines from_row(int64_t m) const { return {values + m * row, row}; }
  Lines from_column(int64_t n) const { return {values + n, row}; }
};

namespace detail {

template <int Rows, int Vectors, typename A>
inline void tile(Broadcast<A> a, Lines<const A> b, Lines<A> c, int64_t depth, bool adds) {
  constexpr int64_t L = kLanes<A>;
  Vec<A> sum[Rows][Vectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) {
      sum[r][j] = adds ? simd::load_as<Vec<A>>(c.values + r * c.row + j * L) : Vec<A>{};
    }
  }
  const A *from = a.values, *with = b.values;
  for (int64_t k = 0; k < depth; ++k, from += a.column, with += b.row) {
    Vec<A> line[Vectors];
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) line[j] = simd::load_as<Vec<A>>(with + j * L);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) sum[r][j] += line[j] * from[r * a.row];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) {
      std::memcpy(c.values + r * c.row + j * L, &sum[r][j], sizeof(Vec<A>));
    }
  }
}

template <int Vectors, typename A>
inline void columns(int64_t rows, Broadcast<A> a, Lines<const A> b, Lines<A> c, int64_t depth,
                    bool adds) {
  int64_t m = 0;
  const auto run = [&]<int Rows>(std::integral_constant<int, Rows>) {
    for (; m + Rows <= rows; m += Rows) {
      tile<Rows, Vectors>(a.from_row(m), b, c.from_row(m), depth, adds);
    }
  };
  run(std::integral_constant<int, kRows>());
  run(std::integral_constant<int, 4>());
  run(std::integral_constant<int, 2>());
  run(std::integral_constant<int, 1>());
}

}  // namespace detail

// kWidth columns of C (+)= A B. A is [rows, depth].
template <typename A>
inline void multiply(int64_t rows, Broadcast<A> a, Lines<const A> b, Lines<A> c, int64_t depth,
                     bool adds) {
  detail::columns<kVectors>(rows, a, b, c, depth, adds);
}

// The same for n columns, a whole number of registers.
template <typename A>
inline void multiply_wide(int64_t rows, int64_t n, Broadcast<A> a, Lines<const A> b, Lines<A> c,
                          int64_t depth, bool adds) {
  int64_t j = 0;
  for (; j + kWidth<A> <= n; j += kWidth<A>) {
    multiply(rows, a, b.from_column(j), c.from_column(j), depth, adds);
  }
  for (; j < n; j += kLanes<A>) {
    detail::columns<1>(rows, a, b.from_column(j), c.from_column(j), depth, adds);
  }
}

// `count` rows of n values, `stride` apart, as rows of A, `width` apart: a whole number of Pairs,
// the rest of which becomes zero.
template <typename T>
inline void widen_rows(const T* x, int64_t stride, int64_t count, int64_t n,
                       Lines<simd::Acc<T>> y) {
  for (int64_t r = 0; r < count; ++r) {
    const T* from = x + r * stride;
    simd::Acc<T>* to = y.values + r * y.row;
    simd::for_each_pair<T>(n, [&](int64_t i, auto elements) {
      simd::store(to + i, simd::load_in_order(from + i, elements));
    });
  }
}

// kWidth rows, of whole registers, as a panel [n][kWidth]: row i becomes lane i.
template <typename A>
inline void to_lanes(Lines<const A> rows, int64_t n, A* panel) {
  constexpr int64_t L = kLanes<A>;
  for (int64_t lane = 0; lane < kWidth<A>; lane += L) {
    for (int64_t i = 0; i < n; i += L) {
      Vec<A> r[L];
#pragma GCC unroll 16
      for (int64_t x = 0; x < L; ++x) {
        r[x] = simd::load_as<Vec<A>>(rows.values + (lane + x) * rows.row + i);
      }
      lanes::transpose<A>(r);
#pragma GCC unroll 16
      for (int64_t x = 0; x < L; ++x) {
        std::memcpy(panel + (i + x) * kWidth<A> + lane, &r[x], sizeof(r[x]));
      }
    }
  }
}

// The other way, each lane times its factor. Both n and the rows are whole registers.
template <typename A>
inline void from_lanes(const A* panel, int64_t n, const A* factors, Lines<A> rows) {
  constexpr int64_t L = kLanes<A>;
  for (int64_t lane = 0; lane < kWidth<A>; lane += L) {
    const auto factor = simd::load_as<Vec<A>>(factors + lane);
    for (int64_t i = 0; i < n; i += L) {
      Vec<A> r[L];
#pragma GCC unroll 16
      for (int64_t x = 0; x < L; ++x) {
        r[x] = simd::load_as<Vec<A>>(panel + (i + x) * kWidth<A> + lane) * factor;
      }
      lanes::transpose<A>(r);
#pragma GCC unroll 16
      for (int64_t x = 0; x < L; ++x) {
        std::memcpy(rows.values + (lane + x) * rows.row + i, &r[x], sizeof(r[x]));
      }
    }
  }
}

}  // namespace metalcore::product
