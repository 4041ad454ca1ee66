// SPDX-License-Identifier: MIT
// Least squares from A = Q B P^T as bidiagonal.h leaves it: no singular vectors are needed where
// every singular value counts.
#pragma once

#include "bidiagonal.h"
#include "householder.h"

namespace metalcore::bidiagonal {

// c -= tau v (v^T c) for rows [first, end) of c[rows][columns].
template <typename T>
inline void reflect_rows(const T* v, Vec<T> tau, int64_t first, int64_t end, T* c,
                         int64_t columns) {
  for (int64_t j = 0; j < columns; ++j) {
    T* x = c + (first * columns + j) * kLanes<T>;
    const T* u = v + first * kLanes<T>;
    const Vec<T> y = tau * lanes::dot(u, 1, x, columns, end - first);
    for (int64_t i = 0; i < end - first; ++i) at(x, i * columns) -= at(u, i) * y;
  }
}

// Q c, or with `kTransposed` Q^T c, in place.
template <bool kTransposed, typename T>
void apply_q(const Panels<T>& a, const Bidiagonal<T>& b, T* c, int64_t columns) {
  for (int64_t step = 0; step < a.columns; ++step) {
    const int64_t k = kTransposed ? step : a.columns - 1 - step;
    at(b.column, k) = splat<T>(1);
    for (int64_t i = k + 1; i < a.rows; ++i) at(b.column, i) = a(i, k);
    reflect_rows(b.column, at(b.tauq, k), k, a.rows, c, columns);
  }
}

template <bool kTransposed, typename T>
void apply_p(const Panels<T>& a, const Bidiagonal<T>& b, T* c, int64_t columns) {
  for (int64_t step = 0; step + 1 < a.columns; ++step) {
    const int64_t k = kTransposed ? step : a.columns - 2 - step;
    at(b.row, k + 1) = splat<T>(1);
    for (int64_t j = k + 2; j < a.columns; ++j) at(b.row, j) = a(k, j);
    reflect_rows(b.row, at(b.taup, k), k + 1, a.columns, c, columns);
  }
}

// B^-1 c in place.
template <typename T>
void substitute(const Bidiagonal<T>& b, int64_t n, T* c, int64_t columns) {
  for (int64_t i = n - 1; i >= 0; --i) {
    const Vec<T> inverse = splat<T>(1) / at(b.d, i);
    for (int64_t j = 0; j < columns; ++j) {
      Vec<T>& x = at(c, i * columns + j);
      if (i + 1 < n) x -= at(b.e, i) * at(c, (i + 1) * columns + j);
      x *= inverse;
    }
  }
}

// B^-T c in place.
template <typename T>
void substitute_transposed(const Bidiagonal<T>& b, int64_t n, T* c, int64_t columns) {
  for (int64_t i = 0; i < n; ++i) {
    const Vec<T> inverse = splat<T>(1) / at(b.d, i);
    for (int64_t j = 0; j < columns; ++j) {
      Vec<T>& x = at(c, i * columns + j);
      if (i > 0) x -= at(b.e, i - 1) * at(c, (i - 1) * columns + j);
      x *= inverse;
    }
  }
}

// A^-1 c, or the solution of least squares: A is tall or square and c has its rows; the first n of
// these become the solution.
template <typename T>
void solve_tall(const Panels<T>& a, const Bidiagonal<T>& b, T* c, int64_t columns) {
  apply_q<true>(a, b, c, columns);
  substitute(b, a.columns, c, columns);
  apply_p<false>(a, b, c, columns);
}

// The solution of smallest norm of A^T x = c: c has n rows and room for all of x.
template <typename T>
void solve_wide(const Panels<T>& a, const Bidiagonal<T>& b, T* c, int64_t columns) {
  apply_p<true>(a, b, c, columns);
  substitute_transposed(b, a.columns, c, columns);
  std::memset(c + a.columns * columns * kLanes<T>, 0,
              (a.rows - a.columns) * columns * sizeof(Vec<T>));
  apply_q<false>(a, b, c, columns);
}

// The same for the lanes that are `deficient`: of singular values that do not count, 1 / s is given
// as zero. left and right are the singular vectors, and c has the rows of `left`.
template <typename T>
void solve_by_vectors(const Panels<T>& left, const Panels<T>& right, const T* inverse, int64_t n,
                      const T* c, int64_t columns, Mask<T> deficient, T* x) {
  for (int64_t i = 0; i < right.rows * columns; ++i) at(x, i) = deficient ? Vec<T>{} : at(x, i);
  for (int64_t j = 0; j < columns; ++j) {
    for (int64_t k = 0; k < n; ++k) {
      Vec<T> y = {};
      for (int64_t i = 0; i < left.rows; ++i) y += left(i, k) * at(c, i * columns + j);
      y = deficient ? y * at(inverse, k) : Vec<T>{};
      for (int64_t i = 0; i < right.rows; ++i) at(x, i * columns + j) += right(i, k) * y;
    }
  }
}

}  // namespace metalcore::bidiagonal
