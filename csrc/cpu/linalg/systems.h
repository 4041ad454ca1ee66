// SPDX-License-Identifier: MIT
// Batches of triangular systems: op(A) X = B, or several op(A) of one A in turn. Few right sides:
// small systems side by side, one per lane. Many: the right sides of one system stand in the lanes.
// Large systems by BLAS.
#pragma once

#include <initializer_list>

#include "../common/aten.h"
#include "../common/policy.h"
#include "expect.h"
#include "triangular.h"

namespace metalcore::cpu {

using simd::kLanes;
using triangular::Triangle;
using Triangles = std::initializer_list<Triangle>;

// Largest N with fewer right sides than a register has lanes, that is solved side by side,
inline const Knob trsm_interleaved_up_to("trsm", "interleaved_up_to", 128);
// for a few systems, where most lanes are idle,
inline const Knob trsm_alone_up_to("trsm", "alone_up_to", 64);
// and with more right sides, which stand in the lanes.
inline const Knob trsm_rows_up_to("trsm", "rows_up_to", 320);

// B and X are both dense, either way.
template <typename T>
void solve_interleaved(const Tensor& A, const Tensor& B, Triangles triangles, Tensor& X) {
  const int64_t n = B.size(-2), k = B.size(-1), lda = lanes::padded(n), size = n * k;
  const bool by_columns = is_by_columns(B);
  const T *a = data<T>(A), *b = data<T>(B);
  T* x = mutable_data<T>(X);
  lanes::for_each_group<T>(X.numel() / size, n * size, [&](int64_t first, int64_t count) {
    T* w = lanes::workspace<T>(n * (lda + k) * kLanes<T>);
    T* right = w + n * lda * kLanes<T>;
    triangular::pack_triangle(a + first * n * n, n, lda, triangles.begin()->lower, n * n, count, w);
    if (by_columns) {
      lanes::pack_transposed(b + first * size, n, k, k, size, count, right);
    } else {
      lanes::pack(b + first * size, size, size, count, right);
    }
    for (const Triangle t : triangles) triangular::solve_lanes(w, n, lda, t, right, k, k);
    if (by_columns) {
      lanes::unpack_transposed(right, n, k, k, false, size, count, x + first * size);
    } else {
      lanes::unpack(right, size, size, count, x + first * size);
    }
  });
}

// Columns that are solved at once: as many as stay in the caches beside A.
constexpr int64_t kColumnsAtOnce = 32;

template <typename T>
void solve_in_rows(const Tensor& A, const Tensor& B, Triangles triangles, Tensor& X) {
  const int64_t n = B.size(-2), k = B.size(-1);
  const int64_t parts = (k + kColumnsAtOnce - 1) / kColumnsAtOnce, systems = X.numel() / (n * k);
  const T *a = data<T>(A), *b = data<T>(B);
  T* x = mutable_data<T>(X);
  // rows are solved faster than lanes: so much takes as long as it takes to wake a thread
  const int64_t grain = std::max<int64_t>(1, 4 * lanes::kGrainFlops / (n * n * kColumnsAtOnce));
  parallel_for(0, systems * parts, grain, [&](int64_t begin, int64_t end) {
    T* spare = lanes::workspace<T>(n * kLanes<T>);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t s = task / parts, c = task % parts * kColumnsAtOnce, at = s * n * k + c;
      const int64_t some = std::min(kColumnsAtOnce, k - c);
      for (int64_t i = 0; i < n; ++i) std::copy_n(b + at + i * k, some, x + at + i * k);
      for (const Triangle t : triangles) {
        triangular::solve_rows(a + s * n * n, n, n, t, x + at, some, k, spare);
      }
    }
  });
}

// Row-major X is column-major X^T, and X^T op(A)^T = B^T needs no transposed copies. For few
// columns these cost nothing, and MKL is slow from the right: 7x for 128 x 4 on two threads.
inline Tensor solve_by_blas(const Tensor& A, const Tensor& B, Triangle t) {
  if (B.size(-1) < 16) {
    const auto [x] = aten<1>("aten::linalg_solve_triangular", "", t.transpose ? turned(A) : A, B,
                             t.lower == t.transpose, true, t.unit);
    return dense(x);
  }
  const auto [X] = aten<1>("aten::linalg_solve_triangular", "", t.transpose ? A : turned(A),
                           turned(B), t.lower != t.transpose, false, t.unit);
  return dense(turned(X));
}

// All triangles are one of A. All tensors are of T. X is laid out as B is, row by row or column by
// column.
template <typename T>
Tensor solve_systems(const Tensor& A_in, const Tensor& B_in, Triangles triangles) {
  const Tensor A = dense(A_in), B = dense_either_way(B_in);
  const int64_t n = B.size(-2), k = B.size(-1);
  if (B.numel() == 0) {
    metalcore_variant = "empty";
    return cpu::empty_like(B);
  }
  const int64_t systems = B.numel() / (n * k);
  // columns go into lanes as fast as rows, and to be turned into rows they would be copied twice
  const int64_t most = is_by_columns(B) ? 2 * kLanes<T> : kLanes<T> - 1;
  const bool few = k <= most, alone = systems * 2 <= kLanes<T>;
  if (n > (few ? (alone ? trsm_alone_up_to : trsm_interleaved_up_to) : trsm_rows_up_to)) {
    metalcore_variant = "lapack";
    Tensor X = dense(B);
    for (const Triangle t : triangles) X = solve_by_blas(A, X, t);
    return laid_out_as(B, X);
  }
  if (few) {
    metalcore_variant = "interleaved";
    Tensor X = cpu::empty_laid_out_as(B);
    solve_interleaved<T>(A, B, triangles, X);
    return X;
  }
  metalcore_variant = "rows";
  Tensor X = cpu::empty_like(B);
  solve_in_rows<T>(A, dense(B), triangles, X);
  return laid_out_as(B, X);
}

// The same for any floating dtype: half types are solved in float and rounded once.
inline Tensor solve_systems(const char* op, const Tensor& A, const Tensor& B, Triangles triangles) {
  expect_square(op, A);
  expect_system(op, A, B);
  const ScalarType dtype = accumulate_dtype(B.scalar_type());
  const Tensor a = to_dtype(A, dtype), b = to_dtype(B, dtype);
  const Tensor X = dtype == ScalarType::Double ? solve_systems<double>(a, b, triangles)
                                               : solve_systems<float>(a, b, triangles);
  return to_dtype(X, B.scalar_type());
}

}  // namespace metalcore::cpu
