// SPDX-License-Identifier: MIT
// One large symmetric matrix made tridiagonal, by reflections from its last row upwards: A = Q T
// Q^T with Q = H_{n-1} ... H_2 and H_i = I - tau_i v_i v_i^T on the first i coordinates. A few of
// them are found before the rest of the matrix is changed, by all of them at once: until then a
// product of it is that of the old matrix, less what they would have changed.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "../common/simd.h"
#include "../common/tensor.h"

namespace metalcore::cpu {

template <typename T>
T dot(const T* x, const T* y, int64_t count) {
  return simd::sum_over<T>(count, [&](int64_t i, auto elements) {
    return simd::load(x + i, elements) * simd::load(y + i, elements);
  });
}

// to[r][c] -= sum over k of left(k)[r] * right(k)[c], for a tile of Rows rows and Wide registers.
template <typename T, int Rows, int Wide, typename Left, typename Right>
inline void subtract_product(int64_t count, Left left, Right right, T* to, int64_t ld) {
  using simd::Vec;
  constexpr int64_t L = simd::kLanes<T>;
  Vec<T> sums[Rows][Wide];
  for (int r = 0; r < Rows; ++r) {
    for (int j = 0; j < Wide; ++j) sums[r][j] = simd::load_as<Vec<T>>(to + r * ld + j * L);
  }
  for (int64_t k = 0; k < count; ++k) {
    const T *a = left(k), *b = right(k);
    Vec<T> values[Wide];
    for (int j = 0; j < Wide; ++j) values[j] = simd::load_as<Vec<T>>(b + j * L);
    for (int r = 0; r < Rows; ++r) {
      for (int j = 0; j < Wide; ++j) sums[r][j] -= a[r] * values[j];
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int j = 0; j < Wide; ++j) std::memcpy(to + r * ld + j * L, &sums[r][j], sizeof(Vec<T>));
  }
}

template <typename T>
class TridiagonalLarge {
 public:
  // Columns of which a row must have a multiple.
  static constexpr int64_t kTile = 3 * simd::kLanes<T>;

  // a: the lower triangle of n rows that are `ld` apart. Row i becomes v_i.
  TridiagonalLarge(T* a, int64_t n, int64_t ld)
      : diagonal(n),
        beside(n),
        tau(n),
        a(a),
        n(n),
        ld(ld),
        pairs(2 * kPairs * ld),
        parts(kParts * ld) {
    int64_t rows = n;
    while (rows > kPairs + 2) {
      // an update takes whole groups of rows
      const int64_t first = rows % kRows ? rows / kRows * kRows : rows - kPairs;
      reduce_rows(first, rows);
      update(first);
      rows = first;
    }
    reduce_rows(0, rows);
  }

  std::vector<T> diagonal, beside, tau;

 private:
  static constexpr int64_t L = simd::kLanes<T>;
  // reflections that are found before an update
  static constexpr int64_t kPairs = 16;
  // tasks of a product: as many for any number of threads, or the results would differ
  static constexpr int64_t kParts = 8, kRowsPerPart = 128;
  // rows that a product and an update take together
  static constexpr int kRows = 4;

  T* v(int64_t k) { return pairs.data() + 2 * k * ld; }
  T* w(int64_t k) { return pairs.data() + (2 * k + 1) * ld; }

  // Rows [first, last), of the first `last` ones of A, from the last one upwards.
  void reduce_rows(int64_t first, int64_t last) {
    constexpr T kDropped = std::is_same_v<T, double> ? T(0x1p-200) : T(0x1p-100);
    std::array<T, 2 * kPairs> factors;
    int64_t found = 0;
    for (int64_t i = last - 1; i >= first; --i) {
      T* x = a + i * ld;
      for (int64_t k = 0; k < found; ++k) {
        factors[2 * k] = w(k)[i];
        factors[2 * k + 1] = v(k)[i];
      }
      subtract_pairs(factors.data(), found, i + 1, x);
      diagonal[i] = x[i];
      if (i == 0) continue;
      const T squares = dot(x, x, i - 1), alpha = x[i - 1];
      if (squares <= kDropped) {
        beside[i - 1] = alpha;
        continue;
      }
      const T beta = -std::copysign(std::sqrt(alpha * alpha + squares), alpha);
      const T t = (beta - alpha) / beta, inverse = 1 / (alpha - beta);
      beside[i - 1] = beta;
      tau[i] = t;
      T *reflector = v(found), *product = w(found);
      for (int64_t c = 0; c + 1 < i; ++c) reflector[c] = x[c] * inverse;
      reflector[i - 1] = 1;
      std::copy_n(reflector, i, x);
      multiply(reflector, i, product);
      for (int64_t k = 0; k < found; ++k) {
        factors[2 * k] = dot(w(k), reflector, i);
        factors[2 * k + 1] = dot(v(k), reflector, i);
      }
      subtract_pairs(factors.data(), found, i, product);
      // w = tau A v - tau / 2 (tau v^T A v) v
      const T half = dot(product, reflector, i) * t * t / 2;
      for (int64_t c = 0; c < i; ++c) product[c] = t * product[c] - half * reflector[c];
      ++found;
    }
    // an update takes all pairs
    std::fill(pairs.begin() + 2 * found * ld, pairs.end(), T(0));
  }

  // y -= the sum of the first 2 `count` rows of `pairs`, times `factors`.
  void subtract_pairs(const T* factors, int64_t count, int64_t columns, T* y) {
    int64_t k = 0;
    for (; k + 2 <= count; k += 2) {
      const T *v0 = v(k), *w0 = w(k), *v1 = v(k + 1), *w1 = w(k + 1), *f = factors + 2 * k;
      for (int64_t c = 0; c < columns; ++c) {
        y[c] -= (f[0] * v0[c] + f[1] * w0[c]) + (f[2] * v1[c] + f[3] * w1[c]);
      }
    }
    if (k == count) return;
    const T *v0 = v(k), *w0 = w(k), *f = factors + 2 * k;
    for (int64_t c = 0; c < columns; ++c) y[c] -= f[0] * v0[c] + f[1] * w0[c];
  }

  // y = A x of the first m rows and columns, each part with rows of as many elements.
  void multiply(const T* x, int64_t m, T* y) {
    const int64_t count = std::clamp<int64_t>(m / kRowsPerPart, 1, kParts);
    const auto first_row = [&](int64_t part) {
      if (part == count) return m;
      return int64_t(m * std::sqrt(double(part) / count)) / kRows * kRows;
    };
    parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) {
        const int64_t last = first_row(part + 1);
        T* to = parts.data() + part * ld;
        std::fill_n(to, m, T(0));
        int64_t row = first_row(part);
        for (; row + kRows <= last; row += kRows) multiply_rows<kRows>(row, x, to);
        for (; row < last; ++row) multiply_rows<1>(row, x, to);
      }
    });
    std::copy_n(parts.data(), m, y);
    for (int64_t part = 1; part < count; ++part) {
      const T* from = parts.data() + part * ld;
      for (int64_t c = 0; c < m; ++c) y[c] += from[c];
    }
  }

  // Adds to y what these rows of the lower triangle and their mirror images make of x.
  template <int Rows>
  void multiply_rows(int64_t row, const T* x, T* y) {
    using simd::Vec;
    Vec<T> sums[Rows] = {}, xr[Rows];
    const T* of[Rows];
    for (int r = 0; r < Rows; ++r) {
      of[r] = a + (row + r) * ld;
      xr[r] = Vec<T>{} + x[row + r];
    }
    int64_t c = 0;
    for (; c + L <= row; c += L) {
      const Vec<T> xc = simd::load_as<Vec<T>>(x + c);
      Vec<T> yc = simd::load_as<Vec<T>>(y + c);
      for (int r = 0; r < Rows; ++r) {
        const Vec<T> values = simd::load_as<Vec<T>>(of[r] + c);
        sums[r] += values * xc;
        yc += values * xr[r];
      }
      std::memcpy(y + c, &yc, sizeof(yc));
    }
    for (int r = 0; r < Rows; ++r) {
      T sum = of[r][row + r] * x[row + r];
      for (int64_t l = 0; l < L; ++l) sum += sums[r][l];
      for (int64_t j = c; j < row + r; ++j) {
        sum += of[r][j] * x[j];
        y[j] += of[r][j] * x[row + r];
      }
      y[row + r] += sum;
    }
  }

  // A -= V^T W + W^T V in the lower triangle of the first m rows.
  void update(int64_t m) {
    constexpr int64_t kBlock = 16 * kRows;
    const int64_t blocks = (m + kBlock - 1) / kBlock;
    const auto update_block = [&](int64_t block) {
      update_rows(block * kBlock, std::min(m, (block + 1) * kBlock));
    };
    // a block of short rows with one of long rows
    parallel_for(0, (blocks + 1) / 2, 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        update_block(block);
        if (blocks - 1 - block != block) update_block(blocks - 1 - block);
      }
    });
  }

  // Also changes what is above the diagonal.
  void update_rows(int64_t first, int64_t last) {
    for (int64_t c = 0; c < last; c += kTile) {
      for (int64_t row = std::max(first, c / kRows * kRows); row < last; row += kRows) {
        // the row of w for one of v, and the other way round
        subtract_product<T, kRows, kTile / L>(
            2 * kPairs, [&](int64_t k) { return pairs.data() + k * ld + row; },
            [&](int64_t k) { return pairs.data() + (k ^ 1) * ld + c; }, a + row * ld + c, ld);
      }
    }
  }

  T* const a;
  const int64_t n, ld;
  // v and w in turns, and what each part of a product has
  std::vector<T> pairs, parts;
};

}  // namespace metalcore::cpu
