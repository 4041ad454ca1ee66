// SPDX-License-Identifier: MIT
// Triangular systems whose numbers are sums of two floats, in float64.

#include <vector>

#include "double_float.h"

namespace metalcore::precise {
namespace {

// X [N, K] of one matrix, row by row.
template <typename T>
void substitute(const Values<T>& A, const Values<T>& B, int64_t first_a, int64_t first_b, int64_t N,
                int64_t K, bool lower, double* X) {
  for (int64_t step = 0; step < N; ++step) {
    const int64_t i = lower ? step : N - 1 - step;
    double* x = X + i * K;
    for (int64_t k = 0; k < K; ++k) x[k] = B[first_b + i * K + k];
    for (int64_t known = 0; known < step; ++known) {
      const int64_t j = lower ? known : N - 1 - known;
      const double a = A[first_a + i * N + j];
      for (int64_t k = 0; k < K; ++k) x[k] -= a * X[j * K + k];
    }
    for (int64_t k = 0; k < K; ++k) x[k] /= A[first_a + i * N + i];
  }
}

Pair double_float_trsm(const Tensor& A_in, const Tensor& A_low_in, const Tensor& B_in,
                       const Tensor& B_low_in, bool lower) {
  const char* op = "double_float_trsm";
  expect_pair(op, A_in, A_low_in);
  expect_pair(op, B_in, B_low_in);
  const Tensor A = cpu::dense(A_in), A_low = cpu::dense(A_low_in);
  const Tensor B = cpu::dense(B_in), B_low = cpu::dense(B_low_in);
  bool is_system = A.dim() >= 2 && A.dim() == B.dim() && A.size(-1) == A.size(-2) &&
                   A.size(-1) == B.size(-2) && A.scalar_type() == B.scalar_type();
  for (int64_t d = 0; is_system && d < A.dim() - 2; ++d) is_system = A.size(d) == B.size(d);
  STD_TORCH_CHECK(is_system, op, ": A must be [..., N, N] and B [..., N, K], of one dtype");
  const int64_t N = B.size(-2), K = B.size(-1), matrices = N * K == 0 ? 0 : B.numel() / (N * K);
  const Tensor high = cpu::empty_like(B), low = cpu::empty_like(B);
  metalcore_variant = "float64";
  dispatch_pair(high, [&](auto type) {
    using T = decltype(type);
    const Values<T> a(A, A_low), b(B, B_low);
    const Results<T> result(high, low);
    cpu::parallel_for(0, matrices, cpu::grain_rows(N * N * K), [&](int64_t begin, int64_t end) {
      std::vector<double> X(N * K);
      for (int64_t m = begin; m < end; ++m) {
        substitute(a, b, m * N * N, m * N * K, N, K, lower, X.data());
        for (int64_t i = 0; i < N * K; ++i) result.set(m * N * K + i, X[i]);
      }
    });
  });
  return {high, low};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("double_float_trsm", cpu::kernel<&double_float_trsm>);
}

}  // namespace metalcore::precise
