// SPDX-License-Identifier: MIT
// op(A) X = B on the CPU. Few right sides: small systems side by side, one per lane. Many: the
// right sides of one system stand in the lanes. Large systems by BLAS.

#include "../common/aten.h"
#include "../common/policy.h"
#include "triangular.h"

namespace metalcore::cpu {
namespace {

using simd::kLanes;
using triangular::Triangle;

const Knob interleaved_up_to("trsm", "interleaved_up_to");
const Knob rows_up_to("trsm", "rows_up_to");
const Knob alone_up_to("trsm", "alone_up_to");

// Columns that are solved at once: as many as stay in the caches beside A.
constexpr int64_t kColumnsAtOnce = 32;

template <typename T>
void trsm_interleaved(const Tensor& A, const Tensor& B, Triangle triangle, Tensor& X) {
  const int64_t n = B.size(-2), k = B.size(-1), lda = lanes::padded(n);
  const T *a = data<T>(A), *b = data<T>(B);
  T* x = mutable_data<T>(X);
  lanes::for_each_group<T>(X.numel() / (n * k), n * n * k, [&](int64_t first, int64_t count) {
    T* w = lanes::workspace<T>((n * lda + n * kColumnsAtOnce) * kLanes<T>);
    T* right = w + n * lda * kLanes<T>;
    triangular::pack_triangle(a + first * n * n, n, lda, triangle.lower, n * n, count, w);
    for (int64_t c = 0; c < k; c += kColumnsAtOnce) {
      const int64_t some = std::min(kColumnsAtOnce, k - c), at = first * n * k + c;
      if (some == k) {
        lanes::pack(b + at, n * k, n * k, count, right);
      } else {
        for (int64_t i = 0; i < n; ++i) {
          lanes::pack(b + at + i * k, some, n * k, count, right + i * some * kLanes<T>);
        }
      }
      triangular::solve_lanes(w, n, lda, triangle, right, some, some);
      if (some == k) {
        lanes::unpack(right, n * k, n * k, count, x + at);
      } else {
        for (int64_t i = 0; i < n; ++i) {
          lanes::unpack(right + i * some * kLanes<T>, some, n * k, count, x + at + i * k);
        }
      }
    }
  });
}

template <typename T>
void trsm_rows(const Tensor& A, const Tensor& B, Triangle triangle, Tensor& X) {
  const int64_t n = B.size(-2), k = B.size(-1);
  const int64_t parts = (k + kColumnsAtOnce - 1) / kColumnsAtOnce, systems = X.numel() / (n * k);
  const T *a = data<T>(A), *b = data<T>(B);
  T* x = mutable_data<T>(X);
  const int64_t grain = std::max<int64_t>(1, lanes::kGrainFlops / (n * n * kColumnsAtOnce));
  parallel_for(0, systems * parts, grain, [&](int64_t begin, int64_t end) {
    T* spare = lanes::workspace<T>(n * kLanes<T>);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t s = task / parts, c = task % parts * kColumnsAtOnce, at = s * n * k + c;
      const int64_t some = std::min(kColumnsAtOnce, k - c);
      for (int64_t i = 0; i < n; ++i) std::copy_n(b + at + i * k, some, x + at + i * k);
      triangular::solve_rows(a + s * n * n, n, n, triangle, x + at, some, k, spare);
    }
  });
}

// Row-major X is column-major X^T, and X^T op(A)^T = B^T needs no transposed copies. A single
// column is both.
Tensor trsm_lapack(const Tensor& A, const Tensor& B, Triangle t) {
  const auto turned = [](const Tensor& x) { return torch::stable::transpose(x, -2, -1); };
  if (B.size(-1) == 1) {
    const auto [x] = aten<1>("aten::linalg_solve_triangular", "", t.transpose ? turned(A) : A, B,
                             t.lower == t.transpose, true, t.unit);
    return dense(x);
  }
  const auto [X] = aten<1>("aten::linalg_solve_triangular", "", t.transpose ? A : turned(A),
                           turned(B), t.lower != t.transpose, false, t.unit);
  return dense(turned(X));
}

template <typename T>
Tensor trsm_of(const Tensor& A_in, const Tensor& B_in, Triangle triangle) {
  const Tensor A = dense(A_in), B = dense(B_in);
  const int64_t n = B.size(-2), k = B.size(-1);
  if (B.numel() == 0) return cpu::empty_like(B);
  const int64_t systems = B.numel() / (n * k);
  const bool few = k < kLanes<T>, alone = systems * 2 <= kLanes<T>;
  if (n > (few ? (alone ? alone_up_to : interleaved_up_to) : rows_up_to)) {
    metalcore_variant = "lapack";
    return trsm_lapack(A, B, triangle);
  }
  Tensor X = cpu::empty_like(B);
  if (few) {
    metalcore_variant = "interleaved";
    trsm_interleaved<T>(A, B, triangle, X);
  } else {
    metalcore_variant = "rows";
    trsm_rows<T>(A, B, triangle, X);
  }
  return X;
}

Tensor trsm(const Tensor& A, const Tensor& B, bool lower, bool transpose, bool unit_diagonal) {
  const ScalarType dtype = accumulate_dtype(B.scalar_type());
  STD_TORCH_CHECK(A.dim() == B.dim() && A.size(-1) == B.size(-2) && A.size(-2) == B.size(-2) &&
                      A.scalar_type() == B.scalar_type(),
                  "trsm: A must be [..., N, N] and B [..., N, K], of one dtype");
  const Triangle triangle{lower, transpose, unit_diagonal};
  const Tensor a = to_dtype(A, dtype), b = to_dtype(B, dtype);
  const Tensor X = dtype == ScalarType::Double ? trsm_of<double>(a, b, triangle)
                                               : trsm_of<float>(a, b, triangle);
  return to_dtype(X, B.scalar_type());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore, CPU, m) { m.impl("trsm", TORCH_BOX(&trsm)); }

}  // namespace metalcore::cpu
