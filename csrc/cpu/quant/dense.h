// SPDX-License-Identifier: MIT
// Products with weights that are dequantized a chunk at a time, by torch's own: for many rows, for
// float64, and for gradients. fill(row, begin, end, to) writes values [begin, end) of a row.
#pragma once

#include "../common/aten.h"
#include "../common/dots.h"
#include "formats.h"

namespace metalcore::cpu::quant {

// Values that are held dequantized at a time: 16 MiB of float.
constexpr int64_t kHeldValues = int64_t(4) << 20;

inline Tensor as_matrix(const Tensor& x, int64_t rows, int64_t columns, ScalarType dtype) {
  return torch::stable::reshape(to_dtype(dense(x), dtype), {rows, columns});
}

// What torch multiplies in: bfloat16 where the CPU has instructions for it.
inline ScalarType product_dtype(ScalarType dtype) {
#if defined(__AVX512F__)
  if (dtype == ScalarType::BFloat16 && product::has_dots()) return dtype;
#endif
  return accumulate_dtype(dtype);
}

template <typename C, typename T>
void copy_columns(const Tensor& from, int64_t M, int64_t count, T* to, int64_t stride) {
  const Tensor source = dense(from);
  const C* values = data<C>(source);
  parallel_for(0, M, grain_rows(count), [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      for (int64_t i = 0; i < count; ++i) to[m * stride + i] = T(values[m * count + i]);
    }
  });
}

// Calls body(C()) for a dtype that product_dtype gives.
template <typename Body>
void dispatch_product(ScalarType dtype, Body body) {
  if (dtype == ScalarType::Double) return body(double());
  if (dtype == ScalarType::BFloat16) return body(simd::BFloat16());
  body(float());
}

// y [M, N] = x W^T, a chunk of rows of W at a time.
template <typename Fill>
void dense_product(const Tensor& x, Tensor& y, int64_t M, int64_t N, int64_t K, Fill fill) {
  const ScalarType dtype = product_dtype(x.scalar_type());
  const Tensor a = as_matrix(x, M, K, dtype);
  const int64_t rows = std::clamp<int64_t>(kHeldValues / std::max<int64_t>(1, K), 16, 4096);
  dispatch_product(dtype, [&](auto type) {
    using C = decltype(type);
    for (int64_t first = 0; first < N; first += rows) {
      const int64_t sizes[] = {std::min(rows, N - first), K};
      const Tensor w = empty(sizes, 2, dtype);
      C* const to = mutable_data<C>(w);
      parallel_for(0, sizes[0], grain_rows(K), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) fill(first + r, 0, K, to + r * K);
      });
      const auto [part] = aten<1>("aten::mm", "", a, turned(w));
      dispatch_float(y.scalar_type(), "matmul", [&](auto element) {
        using T = decltype(element);
        copy_columns<C>(part, M, sizes[0], mutable_data<T>(y) + first, N);
      });
    }
  });
}

// dx [M, K] = dy W, a chunk of columns of W at a time, whole multiples of `unit`.
template <typename Fill>
void dense_gradient(const Tensor& dy, Tensor& dx, int64_t M, int64_t N, int64_t K, int64_t unit,
                    Fill fill) {
  const ScalarType dtype = product_dtype(dy.scalar_type());
  const Tensor a = as_matrix(dy, M, N, dtype);
  const int64_t units = std::max<int64_t>(1, kHeldValues / std::max<int64_t>(1, N) / unit);
  dispatch_product(dtype, [&](auto type) {
    using C = decltype(type);
    for (int64_t first = 0; first < K; first += units * unit) {
      const int64_t count = std::min(units * unit, K - first), sizes[] = {N, count};
      const Tensor w = empty(sizes, 2, dtype);
      C* const to = mutable_data<C>(w);
      parallel_for(0, N, grain_rows(count), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) fill(r, first, first + count, to + r * count);
      });
      const auto [part] = aten<1>("aten::mm", "", a, w);
      dispatch_float(dx.scalar_type(), "matmul", [&](auto element) {
        using T = decltype(element);
        copy_columns<C>(part, M, count, mutable_data<T>(dx) + first, K);
      });
    }
  });
}

}  // namespace metalcore::cpu::quant
