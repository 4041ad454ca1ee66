// SPDX-License-Identifier: MIT
// A group of small matrices, one per lane, on its way to singular values, vectors and least squares
// solutions.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "bidiagonal_qr.h"
#include "bidiagonal_solve.h"
#include "bidiagonal_values.h"

namespace metalcore::bidiagonal {

// The info of input that is not finite, as LAPACK has it.
constexpr int32_t kNotFinite = -4;

// The workspace of a group of matrices, tall or square.
template <typename T>
struct Group {
  int64_t m, n;
  Panels<T> a, u, v;
  Bidiagonal<T> b;
  T* pending;  // also what `find_values` needs
  T* rest;     // the `more` registers that were asked for

  static int64_t scratch(int64_t m) { return panels(m) * kRows; }
  static int64_t registers(int64_t m, int64_t n, int64_t columns) {
    return scratch(m) * n + scratch(m) * columns + scratch(n) * n + 4 * n + 3 * scratch(m) +
           shared(n);
  }
  static int64_t shared(int64_t n) {
    return std::max(Pending<T>::registers(n), values_registers(n));
  }

  Group(int64_t m, int64_t n, int64_t columns, int64_t more = 0) : m(m), n(n) {
    T* next = lanes::workspace<T>((registers(m, n, columns) + more) * kLanes<T>);
    const auto take = [&](int64_t count) {
      T* taken = next;
      next += count * kLanes<T>;
      return taken;
    };
    a = {take(scratch(m) * n), m, n};
    u = {take(scratch(m) * columns), m, columns};
    v = {take(scratch(n) * n), n, n};
    for (T** x : {&b.d, &b.e, &b.tauq, &b.taup}) *x = take(n);
    for (T** x : {&b.column, &b.row, &b.product}) *x = take(scratch(m));
    pending = take(shared(n));
    rest = next;
  }
};

// 2^k just below the largest entry of each lane. Lanes with entries that are not finite become
// zero and are reported in `broken`.
template <typename T>
Vec<T> scale_to_one(T* x, int64_t elements, Mask<T>& broken) {
  Vec<T> largest = {}, sum = {};
  for (int64_t i = 0; i < elements; ++i) {
    largest = lanes::max(largest, lanes::abs(at(x, i)));
    sum += at(x, i) * 0;
  }
  broken = !(sum == 0);
  const Mask<T> infinite = simd::bits_as<Mask<T>>(splat(std::numeric_limits<T>::infinity()));
  const Vec<T> power = lanes::max(simd::bits_as<Vec<T>>(simd::bits_as<Mask<T>>(largest) & infinite),
                                  splat(std::numeric_limits<T>::min()));
  const Vec<T> inverse = broken ? Vec<T>{} : splat<T>(1) / power;
  for (int64_t i = 0; i < elements; ++i) at(x, i) = broken ? Vec<T>{} : at(x, i) * inverse;
  return largest == 0 ? splat<T>(1) : power;
}

// A = Q B P^T of what stands in g.u as rows of n values, scaled to about 1. Returns the scale.
template <typename T>
Vec<T> bidiagonalize(Group<T>& g, Mask<T>& broken) {
  const int64_t m = g.m, n = g.n;
  const Vec<T> power = scale_to_one(g.u.w, m * n, broken);
  std::memset(g.a.w, 0, g.a.registers() * sizeof(Vec<T>));
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) g.a(i, j) = at(g.u.w, i * n + j);
  }
  reduce(g.a, g.b);
  return power;
}

// Singular vectors of B and with them those of A: not all values are positive yet.
template <typename T>
Mask<T> find_vectors(Group<T>& g) {
  form_q(g.a, g.b, g.u);
  form_p(g.a, g.b, g.v);
  Pending<T> pending(g.pending, g.n, g.u, g.v);
  return diagonalize(g.b.d, g.b.e, g.n, pending);
}

// Decomposes what stands in g.u as rows of n values. Returns info.
template <typename T>
Mask<T> decompose(Group<T>& g, bool vectors) {
  const int64_t n = g.n;
  Mask<T> broken;
  const Vec<T> power = bidiagonalize(g, broken);
  Mask<T> failed = {};
  if (vectors) {
    failed = find_vectors(g);
  } else {
    find_values(g.b.d, g.b.e, n, g.pending);
  }
  const Vec<T> bad = splat(std::numeric_limits<T>::quiet_NaN());
  for (int64_t j = 0; j < n; ++j) {
    const Mask<T> negative = at(g.b.d, j) < 0;
    at(g.b.d, j) = broken ? bad : lanes::abs(at(g.b.d, j)) * power;
    if (!vectors || !lanes::any(negative | broken)) continue;
    for (int64_t i = 0; i < n; ++i) g.v(i, j) = broken ? bad : negative ? -g.v(i, j) : g.v(i, j);
  }
  if (vectors && lanes::any(broken)) {
    for (int64_t i = 0; i < g.u.registers(); ++i) at(g.u.w, i) = broken ? bad : at(g.u.w, i);
  }
  return broken ? Mask<T>{} + kNotFinite : failed & 1;
}

// Right sides of a group of least squares problems, [rows][columns], and what solving them needs.
template <typename T>
struct Sides {
  int64_t columns;
  T *c, *given, *d;

  static int64_t registers(int64_t m, int64_t n, int64_t columns) { return 2 * m * columns + n; }
};

// The solution of smallest norm in place of the right sides; singular values up to `rcond` times
// the largest count as zero. A is in g.u; with `wide` it stands there transposed. The values come
// to g.b.d, how many of them count to `rank`. Returns info.
template <typename T>
Mask<T> solve(Group<T>& g, const Sides<T>& sides, bool wide, Vec<T> rcond, Mask<T>& rank) {
  const int64_t n = g.n, columns = sides.columns, unknowns = wide ? g.m : n;
  T* c = sides.c;
  Mask<T> broken;
  const Vec<T> power = bidiagonalize(g, broken);
  // values first: they tell whether B may be divided by
  std::memcpy(sides.d, g.b.d, n * sizeof(Vec<T>));
  find_values(sides.d, g.b.e, n, g.pending);
  Vec<T> least = at(sides.d, 0), most = least;
  for (int64_t j = 1; j < n; ++j) {
    least = lanes::min(least, at(sides.d, j));
    most = lanes::max(most, at(sides.d, j));
  }
  const Vec<T> limit = rcond * most;
  rank = Mask<T>{};
  for (int64_t j = 0; j < n; ++j) rank -= at(sides.d, j) > limit;
  const Mask<T> deficient = !(least > limit);
  if (lanes::any(deficient)) {
    std::memcpy(sides.given, c, (wide ? n : g.m) * columns * sizeof(Vec<T>));
  }
  if (wide) {
    solve_wide(g.a, g.b, c, columns);
  } else {
    solve_tall(g.a, g.b, c, columns);
  }
  Mask<T> failed = {};
  if (lanes::any(deficient)) {
    failed = find_vectors(g) & deficient;
    for (int64_t j = 0; j < n; ++j) {
      const Vec<T> s = at(g.b.d, j);
      at(g.b.d, j) = lanes::abs(s) > limit ? splat<T>(1) / s : Vec<T>{};
    }
    const Panels<T>&left = wide ? g.v : g.u, &right = wide ? g.u : g.v;
    solve_by_vectors(left, right, g.b.d, n, sides.given, columns, deficient, c);
  }
  const Vec<T> bad = splat(std::numeric_limits<T>::quiet_NaN());
  const Vec<T> inverse = broken ? bad : splat<T>(1) / power;
  for (int64_t i = 0; i < unknowns * columns; ++i) at(c, i) *= inverse;
  for (int64_t j = 0; j < n; ++j) at(g.b.d, j) = broken ? bad : at(sides.d, j) * power;
  return broken ? Mask<T>{} + kNotFinite : failed & 1;
}

// The columns of x in the order of each lane, into `count` row-major matrices.
template <typename T>
void write_columns(const Panels<T>& x, const int32_t* order, int64_t n, int64_t count, T* row,
                   T* values, T* out) {
  const int64_t columns = x.columns;
  for (int64_t i = 0; i < x.rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) at(row, j) = x(i, j);
    lanes::unpack(row, columns, columns, count, values);
    for (int64_t l = 0; l < count; ++l) {
      T* to = out + (l * x.rows + i) * columns;
      const T* from = values + l * columns;
      for (int64_t j = 0; j < n; ++j) to[j] = from[order[l * n + j]];
      for (int64_t j = n; j < columns; ++j) to[j] = from[j];
    }
  }
}

// The order of each lane's singular values, [count][n].
template <typename T>
std::vector<int32_t> descending(const Group<T>& g, int64_t count) {
  std::vector<int32_t> order(count * g.n);
  for (int64_t l = 0; l < count; ++l) {
    int32_t* mine = order.data() + l * g.n;
    const auto value = [&](int32_t j) { return at(g.b.d, j)[l]; };
    std::iota(mine, mine + g.n, 0);
    std::stable_sort(mine, mine + g.n, [&](int32_t i, int32_t j) { return value(i) > value(j); });
  }
  return order;
}

}  // namespace metalcore::bidiagonal
