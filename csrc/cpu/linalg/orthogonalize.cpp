// SPDX-License-Identifier: MIT
// Orthonormal columns on the CPU: A R^-1 with R^T R = A^T A, twice, in float64. By Householder
// where that fails, as it does for columns that depend on each other.

#include <cmath>
#include <limits>

#include "../common/aten.h"
#include "expect.h"

namespace metalcore::cpu {
namespace {

// A R^-1, and what Cholesky says of A^T A.
struct Divided {
  Tensor Q, info;
};

Divided divide_by_factor(const Tensor& A) {
  const Tensor gram = torch::stable::matmul(torch::stable::transpose(A, -2, -1), A);
  const auto [L, info] = aten<2>("aten::linalg_cholesky_ex", "", gram, false, false);
  const Tensor R = torch::stable::transpose(L, -2, -1);
  return {aten<1>("aten::linalg_solve_triangular", "", R, A, true, false, false)[0], info};
}

// The largest entry of G - I; NaN where one is.
double off_identity(const double* G, int64_t n) {
  double largest = 0;
  for (int64_t i = 0; i < n * n; ++i) {
    const double off = std::abs(G[i] - (i % (n + 1) == 0));
    largest = off <= largest ? largest : off;
  }
  return largest;
}

// Q = that of A by reflections, with the signs of a positive diagonal of R.
template <typename T>
void householder(const Tensor& A, T* Q) {
  const auto [q, r] = aten<2>("aten::linalg_qr", "", A, std::string("reduced"));
  const Tensor from = dense(q), R = dense(r);
  const int64_t m = A.size(0), n = A.size(1);
  const T *x = data<T>(from), *triangle = data<T>(R);
  for (int64_t i = 0; i < m * n; ++i) Q[i] = triangle[i % n * (n + 1)] < 0 ? -x[i] : x[i];
}

template <typename T>
Tensor orthogonalize_tall(const Tensor& given) {
  const Tensor A = dense(given);
  const int64_t m = A.size(-2), n = A.size(-1), batch = A.numel() / std::max<int64_t>(1, m * n);
  metalcore_variant = A.numel() == 0 ? "empty" : "gram";
  if (A.numel() == 0) return torch::stable::clone(A);
  const Tensor matrices = torch::stable::view(A, {batch, m, n});
  const Divided once = divide_by_factor(to_dtype(matrices, ScalarType::Double));
  const auto [Q64, info] = divide_by_factor(once.Q);
  const Tensor gram = dense(torch::stable::matmul(torch::stable::transpose(Q64, -2, -1), Q64));
  // a copy of its own: the product may be A's memory where R is the identity
  Tensor Q = torch::stable::clone(dense(to_dtype(Q64, A.scalar_type())));
  const double allowed =
      std::max(std::numeric_limits<T>::epsilon() / 16.0, 2e-15 * std::sqrt(double(n)));
  for (int64_t b = 0; b < batch; ++b) {
    const bool factored = data<int32_t>(once.info)[b] == 0 && data<int32_t>(info)[b] == 0;
    if (factored && off_identity(data<double>(gram) + b * n * n, n) <= allowed) continue;
    metalcore_variant = "gram_householder";
    householder(torch::stable::select(matrices, 0, b), mutable_data<T>(Q) + b * m * n);
  }
  return torch::stable::view(Q, A.sizes());
}

Tensor orthogonalize(const Tensor& A) {
  expect_matrices("orthogonalize", A);
  STD_TORCH_CHECK(A.size(-2) >= A.size(-1), "orthogonalize: A must have as many rows as columns");
  const ScalarType dtype = accumulate_dtype(A.scalar_type());
  const Tensor wide = to_dtype(A, dtype);
  const Tensor Q = dtype == ScalarType::Double ? orthogonalize_tall<double>(wide)
                                               : orthogonalize_tall<float>(wide);
  return to_dtype(Q, A.scalar_type());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("orthogonalize", kernel<&orthogonalize>);
}

}  // namespace metalcore::cpu
