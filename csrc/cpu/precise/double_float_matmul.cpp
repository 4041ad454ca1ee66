// SPDX-License-Identifier: MIT
// Products of matrices whose numbers are sums of two floats: A B in float64, by torch's own; and
// C - D - A B as sums of two doubles, so that 48 bits are left of large numbers that cancel.

#include <vector>

#include "../common/aten.h"
#include "double_float.h"

namespace metalcore::precise {
namespace {

using Optional = std::optional<Tensor>;

// s + e = x + y without error
inline double two_sum(double x, double y, double& e) {
  const double s = x + y, of_y = s - x;
  e = (x - (s - of_y)) + (y - of_y);
  return s;
}

Tensor in_float64(const Tensor& high_in, const Tensor& low_in) {
  const Tensor high = cpu::dense(high_in), low = cpu::dense(low_in);
  const Tensor wide = cpu::empty(high.sizes().data(), high.dim(), ScalarType::Double);
  double* to = cpu::mutable_data<double>(wide);
  dispatch_pair(high, [&](auto type) {
    const Values<decltype(type)> from(high, low);
    cpu::parallel_for(0, high.numel(), cpu::kGrainElements, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) to[i] = from[i];
    });
  });
  return wide;
}

// A row of C - D less that of A B: products of floats are exact in float64.
template <typename T>
void left_of_row(const T* a, const T* a_low, const T* B, const T* B_low, int64_t K, int64_t N,
                 double* high, double* low) {
  for (int64_t k = 0; k < K; ++k) {
    const double x = -double(a[k]), x_low = -double(a_low[k]);
    const T *b = B + k * N, *b_low = B_low + k * N;
    for (int64_t j = 0; j < N; ++j) {
      double first, second, third;
      double sum = two_sum(high[j], x * double(b[j]), first);
      sum = two_sum(sum, x * double(b_low[j]), second);
      sum = two_sum(sum, x_low * double(b[j]), third);
      high[j] = sum;
      low[j] += (first + second) + (third + x_low * double(b_low[j]));
    }
  }
}

template <typename T>
void leave(const Tensor& A, const Tensor& A_low, const Tensor& B, const Tensor& B_low,
           const std::array<Tensor, 4>& start, const Tensor& high, const Tensor& low) {
  const int64_t M = A.size(-2), K = A.size(-1), N = B.size(-1);
  const T *a = cpu::data<T>(A), *a_low = cpu::data<T>(A_low);
  const T *b = cpu::data<T>(B), *b_low = cpu::data<T>(B_low);
  const T *c = cpu::data<T>(start[0]), *c_low = cpu::data<T>(start[1]);
  const T *d = cpu::data<T>(start[2]), *d_low = cpu::data<T>(start[3]);
  const Results<T> result(high, low);
  const int64_t rows = N == 0 ? 0 : high.numel() / N;
  cpu::parallel_for(0, rows, cpu::grain_rows(N * K), [&](int64_t begin, int64_t end) {
    std::vector<double> sum(N), lost(N);
    for (int64_t r = begin; r < end; ++r) {
      const int64_t of_b = r / M * K * N;
      for (int64_t j = 0; j < N; ++j) {
        const int64_t i = r * N + j;
        sum[j] = two_sum(double(c[i]), -double(d[i]), lost[j]);
        lost[j] += double(c_low[i]) - double(d_low[i]);
      }
      left_of_row(a + r * K, a_low + r * K, b + of_b, b_low + of_b, K, N, sum.data(), lost.data());
      for (int64_t j = 0; j < N; ++j) {
        double below;
        const double total = two_sum(sum[j], lost[j], below);
        std::isfinite(total) ? result.set(r * N + j, total, below) : result.set(r * N + j, sum[j]);
      }
    }
  });
}

Pair double_float_matmul(const Tensor& A, const Tensor& A_low, const Tensor& B, const Tensor& B_low,
                         const Optional& C, const Optional& C_low, const Optional& D,
                         const Optional& D_low) {
  const char* op = "double_float_matmul";
  expect_pair(op, A, A_low);
  expect_pair(op, B, B_low);
  bool is_product = A.dim() >= 2 && A.dim() == B.dim() && A.size(-1) == B.size(-2) &&
                    A.scalar_type() == B.scalar_type();
  for (int64_t d = 0; is_product && d < A.dim() - 2; ++d) is_product = A.size(d) == B.size(d);
  STD_TORCH_CHECK(is_product, op, ": A must be [..., M, K] and B [..., K, N], of one dtype");
  std::vector<int64_t> sizes(A.sizes().begin(), A.sizes().end());
  sizes.back() = B.size(-1);
  const Tensor high = cpu::empty(sizes.data(), A.dim(), A.scalar_type());
  const Tensor low = cpu::empty_like(high);
  const int given = C.has_value() + C_low.has_value() + D.has_value() + D_low.has_value();
  STD_TORCH_CHECK(given == 0 || given == 4, op, ": C and D must be pairs, or not be there");
  if (given == 4) {
    for (const Optional* t : {&C, &C_low, &D, &D_low}) cpu::expect_like(op, "C and D", **t, high);
    metalcore_variant = "left";
    dispatch_pair(high, [&](auto type) {
      leave<decltype(type)>(
          cpu::dense(A), cpu::dense(A_low), cpu::dense(B), cpu::dense(B_low),
          {cpu::dense(*C), cpu::dense(*C_low), cpu::dense(*D), cpu::dense(*D_low)}, high, low);
    });
    return {high, low};
  }
  metalcore_variant = "float64";
  const Tensor product =
      cpu::dense(cpu::aten<1>("aten::matmul", "", in_float64(A, A_low), in_float64(B, B_low))[0]);
  dispatch_pair(high, [&](auto type) {
    const Results<decltype(type)> result(high, low);
    const double* from = cpu::data<double>(product);
    cpu::parallel_for(0, high.numel(), cpu::kGrainElements, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) result.set(i, from[i]);
    });
  });
  return {high, low};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("double_float_matmul", cpu::kernel<&double_float_matmul>);
}

}  // namespace metalcore::precise
