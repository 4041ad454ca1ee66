// SPDX-License-Identifier: MIT
// Singular values and vectors of small matrices, one per lane: A = Q B P^T by Householder
// reflectors, B bidiagonal with diagonal d and e above it; then implicit QR steps on B, all lanes
// in lock step, whose rotations turn the columns of Q and P into singular vectors.
//
// Matrices stand in panels of four rows, [row / 4][column][row % 4], so that both sums down the
// columns and work on whole rows read memory in order, four registers at a time. Rows past the
// end are zero. Entries are at most 1 in size, so that squares neither overflow nor matter where
// they underflow.
#pragma once

#include <limits>

#include "../common/lanes.h"

namespace metalcore::bidiagonal {

using lanes::at;
using lanes::Mask;
using lanes::splat;
using simd::kLanes;
using simd::Vec;

constexpr int64_t kRows = 4;

inline int64_t panels(int64_t rows) { return (rows + kRows - 1) / kRows; }

template <typename T>
struct Panels {
  T* w;
  int64_t rows, columns;

  int64_t registers() const { return panels(rows) * columns * kRows; }
  T* panel(int64_t p) const { return w + p * columns * kRows * kLanes<T>; }
  Vec<T>& operator()(int64_t i, int64_t j) const {
    return at(w, (i / kRows * columns + j) * kRows + i % kRows);
  }
};

// Sums of squares below this are taken for zero: they are no longer relatively exact.
template <typename T>
constexpr T kNothing = std::numeric_limits<T>::min() / std::numeric_limits<T>::epsilon();

// The reflector I - tau v v^T that maps x[first..end) to beta at `first`: v replaces x, v[first]
// = 1.
template <typename T>
inline void reflector(T* x, int64_t first, int64_t end, Vec<T>& beta, Vec<T>& tau) {
  Vec<T> a = {}, b = {};
  int64_t i = first + 1;
  for (; i + 1 < end; i += 2) {
    a += at(x, i) * at(x, i);
    b += at(x, i + 1) * at(x, i + 1);
  }
  if (i < end) a += at(x, i) * at(x, i);
  const Vec<T> alpha = at(x, first), rest = a + b;
  const Mask<T> some = rest > kNothing<T>;
  const Vec<T> norm = lanes::copysign(lanes::sqrt(alpha * alpha + rest), alpha);
  beta = some ? -norm : alpha;
  tau = some ? (alpha + norm) / norm : Vec<T>{};
  const Vec<T> scale = some ? splat<T>(1) / (alpha + norm) : Vec<T>{};
  at(x, first) = splat<T>(1);
  for (i = first + 1; i < end; ++i) at(x, i) *= scale;
}

// out[j] = tau * sum_i v[i] a[i, j] for columns [from, a.columns); v is zero in rows before `row`.
template <typename T>
inline void project(const Panels<T>& a, const T* v, Vec<T> tau, int64_t row, int64_t from, T* out) {
  for (int64_t j = from; j < a.columns; ++j) at(out, j) = Vec<T>{};
  const int64_t last = panels(a.rows) - 1;
  for (int64_t p = row / kRows; p <= last; ++p) {
    const T* x = a.panel(p);
    const Vec<T> v0 = at(v, p * 4), v1 = at(v, p * 4 + 1), v2 = at(v, p * 4 + 2),
                 v3 = at(v, p * 4 + 3);
    for (int64_t j = from; j < a.columns; ++j) {
      at(out, j) += (v0 * at(x, j * 4) + v1 * at(x, j * 4 + 1)) +
                    (v2 * at(x, j * 4 + 2) + v3 * at(x, j * 4 + 3));
    }
  }
  for (int64_t j = from; j < a.columns; ++j) at(out, j) *= tau;
}

// a[i, j] -= v[i] w[j] for the rows of panel p.
template <typename T>
inline void subtract_outer(const Panels<T>& a, int64_t p, const Vec<T> v[kRows], const T* w,
                           int64_t from) {
  T* x = a.panel(p);
  const Vec<T> v0 = v[0], v1 = v[1], v2 = v[2], v3 = v[3];
  for (int64_t j = from; j < a.columns; ++j) {
    const Vec<T> wj = at(w, j);
    at(x, j * 4) -= v0 * wj;
    at(x, j * 4 + 1) -= v1 * wj;
    at(x, j * 4 + 2) -= v2 * wj;
    at(x, j * 4 + 3) -= v3 * wj;
  }
}

// Both reflectors of a step on the rows of panel p: a -= v w^T, then a -= (taup a u) u^T. Rows up
// to `done` keep what they are.
template <typename T>
inline void update_rows(const Panels<T>& a, int64_t p, const T* v, const T* w, const T* u,
                        Vec<T> taup, int64_t done, int64_t from) {
  T* x = a.panel(p);
  Vec<T> r[kRows];
  for (int64_t i = 0; i < kRows; ++i) r[i] = p * 4 + i > done ? at(v, p * 4 + i) : Vec<T>{};
  const Vec<T> v0 = r[0], v1 = r[1], v2 = r[2], v3 = r[3];
  Vec<T> s0 = {}, s1 = {}, s2 = {}, s3 = {};
  for (int64_t j = from; j < a.columns; ++j) {
    const Vec<T> wj = at(w, j), uj = at(u, j);
    const Vec<T> x0 = at(x, j * 4) - v0 * wj, x1 = at(x, j * 4 + 1) - v1 * wj;
    const Vec<T> x2 = at(x, j * 4 + 2) - v2 * wj, x3 = at(x, j * 4 + 3) - v3 * wj;
    s0 += x0 * uj;
    s1 += x1 * uj;
    s2 += x2 * uj;
    s3 += x3 * uj;
    at(x, j * 4) = x0;
    at(x, j * 4 + 1) = x1;
    at(x, j * 4 + 2) = x2;
    at(x, j * 4 + 3) = x3;
  }
  r[0] = s0 * taup, r[1] = s1 * taup, r[2] = s2 * taup, r[3] = s3 * taup;
  for (int64_t i = 0; i < kRows; ++i) r[i] = p * 4 + i > done ? r[i] : Vec<T>{};
  subtract_outer(a, p, r, u, from);
}

// Vectors of one problem beside its matrices.
template <typename T>
struct Bidiagonal {
  T *d, *e, *tauq, *taup;     // [n]
  T *column, *row, *product;  // scratch, [panels(max(m, columns of U)) * 4]
};

// A = Q B P^T. The vectors of Q's reflectors stay below the diagonal of `a`, those of P's right of
// the one above it, without their leading 1.
template <typename T>
void reduce(const Panels<T>& a, const Bidiagonal<T>& b) {
  const int64_t m = a.rows, n = a.columns;
  for (int64_t k = 0; k < n; ++k) {
    for (int64_t i = k / kRows * kRows; i < k; ++i) at(b.column, i) = Vec<T>{};
    for (int64_t i = k; i < m; ++i) at(b.column, i) = a(i, k);
    for (int64_t i = m; i < panels(m) * kRows; ++i) at(b.column, i) = Vec<T>{};
    reflector(b.column, k, m, at(b.d, k), at(b.tauq, k));
    for (int64_t i = k + 1; i < m; ++i) a(i, k) = at(b.column, i);
    at(b.e, k) = at(b.taup, k) = Vec<T>{};
    if (k + 1 == n) break;

    project(a, b.column, at(b.tauq, k), k, k + 1, b.product);
    for (int64_t j = k + 1; j < n; ++j) at(b.row, j) = a(k, j) - at(b.product, j);
    reflector(b.row, k + 1, n, at(b.e, k), at(b.taup, k));
    for (int64_t j = k + 1; j < n; ++j) a(k, j) = at(b.row, j);
    for (int64_t p = k / kRows; p < panels(m); ++p) {
      update_rows(a, p, b.column, b.product, b.row, at(b.taup, k), k, k + 1);
    }
  }
}

template <typename T>
void set_identity(const Panels<T>& q) {
  std::memset(q.w, 0, q.registers() * sizeof(Vec<T>));
  for (int64_t i = 0; i < std::min(q.rows, q.columns); ++i) q(i, i) = splat<T>(1);
}

// q = (I - tau v v^T) q, where v starts at `first` and q is the identity before it.
template <typename T>
inline void reflect(const Panels<T>& q, const T* v, Vec<T> tau, int64_t first, T* product) {
  project(q, v, tau, first, first, product);
  for (int64_t p = first / kRows; p < panels(q.rows); ++p) {
    const Vec<T> r[kRows] = {at(v, p * 4), at(v, p * 4 + 1), at(v, p * 4 + 2), at(v, p * 4 + 3)};
    subtract_outer(q, p, r, product, first);
  }
}

// The first columns of Q, from what `reduce` left in a.
template <typename T>
void form_q(const Panels<T>& a, const Bidiagonal<T>& b, const Panels<T>& q) {
  set_identity(q);
  for (int64_t k = a.columns - 1; k >= 0; --k) {
    for (int64_t i = k / kRows * kRows; i < k; ++i) at(b.column, i) = Vec<T>{};
    at(b.column, k) = splat<T>(1);
    for (int64_t i = k + 1; i < a.rows; ++i) at(b.column, i) = a(i, k);
    for (int64_t i = a.rows; i < panels(a.rows) * kRows; ++i) at(b.column, i) = Vec<T>{};
    reflect(q, b.column, at(b.tauq, k), k, b.product);
  }
}

template <typename T>
void form_p(const Panels<T>& a, const Bidiagonal<T>& b, const Panels<T>& q) {
  const int64_t n = a.columns;
  set_identity(q);
  for (int64_t k = n - 2; k >= 0; --k) {
    for (int64_t i = (k + 1) / kRows * kRows; i <= k; ++i) at(b.column, i) = Vec<T>{};
    at(b.column, k + 1) = splat<T>(1);
    for (int64_t j = k + 2; j < n; ++j) at(b.column, j) = a(k, j);
    for (int64_t j = n; j < panels(n) * kRows; ++j) at(b.column, j) = Vec<T>{};
    reflect(q, b.column, at(b.taup, k), k + 1, b.product);
  }
}

}  // namespace metalcore::bidiagonal
