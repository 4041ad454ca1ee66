// SPDX-License-Identifier: MIT
// householder_vector and apply_householder on the CPU. Vectors are taken one by one; A is read in
// rows, in blocks of columns where H stands on its left.

#include <cmath>
#include <tuple>
#include <vector>

#include "../common/aten.h"
#include "expect.h"

namespace metalcore::cpu {
namespace {

// Columns whose sums stay in the first-level cache.
constexpr int64_t kBlockColumns = 512;

// v from x; returns tau. Where squares would over- or underflow, of x times a power of two.
template <typename T>
T householder_vector_row(const T* x, int64_t n, T* v) {
  constexpr T kSmall = sizeof(T) == 8 ? 0x1p-900 : 0x1p-80f;
  constexpr T kLarge = sizeof(T) == 8 ? 0x1p500 : 0x1p60f;
  T scale = 1, alpha = x[0];
  T tail = simd::sum_over<T>(n - 1, [&](int64_t i, auto elements) {
    const auto y = simd::load(x + 1 + i, elements);
    return y * y;
  });
  if (!(tail > kSmall && tail < kLarge * kLarge && std::abs(alpha) < kLarge)) {
    T largest = std::abs(alpha), largest_below = 0;
    for (int64_t i = 1; i < n; ++i) largest_below = std::max(largest_below, std::abs(x[i]));
    largest = std::max(largest, largest_below);
    if (largest > 0 && std::isfinite(largest)) {
      constexpr int kMost = sizeof(T) == 8 ? 1000 : 100;
      scale = std::ldexp(T(1), std::clamp(-std::ilogb(largest), -kMost, kMost));
    }
    alpha *= scale;
    tail = 0;
    for (int64_t i = 1; i < n; ++i) tail += (x[i] * scale) * (x[i] * scale);
    // NaN does not count as zero
    if (largest_below == 0 && !(tail != tail)) {
      std::fill(v, v + n, T(0));
      v[0] = 1;
      return 0;
    }
  }
  const T beta = -std::copysign(std::sqrt(alpha * alpha + tail), alpha);
  const T inverse = 1 / (alpha - beta);
  v[0] = 1;
  for (int64_t i = 1; i < n; ++i) v[i] = x[i] * scale * inverse;
  return (beta - alpha) / beta;
}

template <typename T>
void apply_left(const T* a, const T* v, T tau, int64_t m, int64_t n, int64_t begin, int64_t end,
                T* y) {
  std::array<T, kBlockColumns> sums = {};
  const int64_t width = end - begin;
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < width; ++j) sums[j] += v[i] * a[i * n + begin + j];
  }
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < width; ++j) {
      y[i * n + begin + j] = a[i * n + begin + j] - tau * v[i] * sums[j];
    }
  }
}

template <typename T>
void apply_right(const T* a, const T* v, T tau, int64_t n, T* y) {
  const T dot = tau * simd::sum_over<T>(n, [&](int64_t j, auto elements) {
                  return simd::load(a + j, elements) * simd::load(v + j, elements);
                });
  for (int64_t j = 0; j < n; ++j) y[j] = a[j] - dot * v[j];
}

std::tuple<Tensor, Tensor> householder_vector(const Tensor& x_in) {
  expect_rows("householder_vector", x_in);
  STD_TORCH_CHECK(x_in.size(-1) > 0, "householder_vector: x must have a value or more");
  const ScalarType dtype = accumulate_dtype(x_in.scalar_type());
  const Tensor x = dense(to_dtype(x_in, dtype));
  const int64_t n = x.size(-1);
  metalcore_variant = "vectors";
  Tensor v = cpu::empty_like(x), tau = cpu::empty(x.sizes().data(), x.dim() - 1, dtype);
  dispatch_float(dtype, "householder_vector", [&]<typename T>(T) {
    if constexpr (std::is_same_v<T, simd::Acc<T>>) {
      const T* from = data<T>(x);
      T *to = mutable_data<T>(v), *taus = mutable_data<T>(tau);
      parallel_for(0, tau.numel(), grain_rows(n), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          taus[r] = householder_vector_row(from + r * n, n, to + r * n);
        }
      });
    }
  });
  return {to_dtype(v, x_in.scalar_type()), to_dtype(tau, x_in.scalar_type())};
}

Tensor apply_householder(const Tensor& A_in, const Tensor& v_in, const Tensor& tau_in, bool left) {
  expect_matrices("apply_householder", A_in);
  const int64_t dim = A_in.dim();
  STD_TORCH_CHECK(
      v_in.dim() == dim - 1 && tau_in.dim() == dim - 2 && same_batch(v_in, A_in, dim - 2) &&
          same_batch(tau_in, A_in, dim - 2) && v_in.size(-1) == A_in.size(left ? -2 : -1) &&
          v_in.scalar_type() == A_in.scalar_type() && tau_in.scalar_type() == A_in.scalar_type(),
      "apply_householder: A must be [..., M, N], v [..., M] or [..., N] and tau [...], "
      "of one dtype and batch");
  const ScalarType dtype = accumulate_dtype(A_in.scalar_type());
  const Tensor A = dense(to_dtype(A_in, dtype)), v = dense(to_dtype(v_in, dtype));
  const Tensor tau = dense(to_dtype(tau_in, dtype));
  const int64_t m = A.size(-2), n = A.size(-1), batch = tau.numel();
  metalcore_variant = left ? "columns" : "rows";
  Tensor Y = cpu::empty_like(A);
  dispatch_float(dtype, "apply_householder", [&]<typename T>(T) {
    if constexpr (std::is_same_v<T, simd::Acc<T>>) {
      const T *a = data<T>(A), *u = data<T>(v), *t = data<T>(tau);
      T* y = mutable_data<T>(Y);
      const int64_t blocks = left ? (n + kBlockColumns - 1) / kBlockColumns : m;
      const int64_t work = left ? m * std::min(n, kBlockColumns) : n;
      parallel_for(0, batch * blocks, grain_rows(work), [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; ++task) {
          const int64_t b = task / blocks, first = task % blocks * kBlockColumns;
          if (left) {
            apply_left(a + b * m * n, u + b * m, t[b], m, n, first,
                       std::min(n, first + kBlockColumns), y + b * m * n);
          } else {
            apply_right(a + task * n, u + b * n, t[b], n, y + task * n);
          }
        }
      });
    }
  });
  return to_dtype(Y, A_in.scalar_type());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("householder_vector", kernel<&householder_vector>);
  m.impl("apply_householder", kernel<&apply_householder>);
}

}  // namespace metalcore::cpu
