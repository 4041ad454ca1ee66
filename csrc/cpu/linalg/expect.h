// SPDX-License-Identifier: MIT
// What the kernels of matrices rely on, checked once per call.
#pragma once

#include "../common/tensor.h"

namespace metalcore::cpu {

inline void expect_matrices(const char* op, const Tensor& A) {
  expect_float(op, A);
  STD_TORCH_CHECK(A.dim() >= 2, op, ": A must be [..., M, N]");
}

inline void expect_square(const char* op, const Tensor& A) {
  expect_matrices(op, A);
  STD_TORCH_CHECK(A.size(-1) == A.size(-2), op, ": A must be [..., N, N]");
}

// Whether the first `count` sizes are the same.
inline bool same_batch(const Tensor& A, const Tensor& B, int64_t count) {
  const auto a = A.sizes(), b = B.sizes();
  return std::equal(a.begin(), a.begin() + count, b.begin());
}

// A [..., M, N] and B [..., M, K], of one dtype.
inline void expect_system(const char* op, const Tensor& A, const Tensor& B) {
  expect_matrices(op, A);
  STD_TORCH_CHECK(
      B.dim() == A.dim() && same_batch(A, B, A.dim() - 1) && B.scalar_type() == A.scalar_type(), op,
      ": A must be [..., M, N] and B [..., M, K], of one dtype and batch");
}

}  // namespace metalcore::cpu
