// SPDX-License-Identifier: MIT
// Residual add and RMSNorm on the CPU: sum = x + residual, y = sum * rstd * scale, row by row.
// The norm is that of the sum as it is stored, so that the backward pass sees the same numbers.

#include <tuple>

#include "norm.h"

namespace metalcore::cpu {
namespace {

// `sum` may be the memory of `residual`.
template <typename T>
void add_rms_norm_rows(const Tensor& x, const Tensor& residual, const std::optional<Tensor>& weight,
                       double eps, double weight_offset, Tensor& y, Tensor& sum, Tensor& rstd) {
  using A = Acc<T>;
  const int64_t n = x.size(-1);
  const Scale<T> scale(weight, weight_offset, n, "add_rms_norm");
  const T* xp = data<T>(x);
  const T* bp = data<T>(residual);
  T* yp = mutable_data<T>(y);
  T* sp = mutable_data<T>(sum);
  A* rp = mutable_data<A>(rstd);
  const bool streams = streams_past_cache<T>(y, n);
  metalcore_variant = streams ? "rows_streamed" : "rows";
  parallel_for(0, rstd.numel(), grain_rows(n), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T *a = xp + r * n, *b = bp + r * n;
      T* s = sp + r * n;
      const A squares = simd::sum_over<T>(n, [&](int64_t i, auto elements) {
        simd::store(s + i, simd::load(a + i, elements) + simd::load(b + i, elements), elements);
        const auto v = simd::load(s + i, elements);
        return v * v;
      });
      rp[r] = reciprocal_rms(squares, n, A(eps));
      scale_row(s, rp[r], scale.get(), n, yp + r * n, streams);
    }
    simd::end_stream();
  });
}

void run(const Tensor& x, const Tensor& residual, const std::optional<Tensor>& weight, double eps,
         double weight_offset, Tensor& y, Tensor& sum, Tensor& rstd) {
  expect_like("add_rms_norm", "residual", residual, x);
  dispatch_float(x.scalar_type(), "add_rms_norm", [&](auto type) {
    add_rms_norm_rows<decltype(type)>(x, residual, weight, eps, weight_offset, y, sum, rstd);
  });
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& x_in, const Tensor& residual_in,
                                                std::optional<Tensor> weight, double eps,
                                                double weight_offset) {
  expect_rows("add_rms_norm", x_in);
  const Tensor x = dense(x_in), residual = dense(residual_in);
  Tensor y = cpu::empty_like(x), sum = cpu::empty_like(x), rstd = empty_per_row(x);
  run(x, residual, weight, eps, weight_offset, y, sum, rstd);
  return {y, sum, rstd};
}

std::tuple<Tensor, Tensor> add_rms_norm_in_place(const Tensor& x_in, Tensor residual,
                                                 std::optional<Tensor> weight, double eps,
                                                 double weight_offset) {
  expect_rows("add_rms_norm", x_in);
  const Tensor x = dense(x_in);
  Tensor y = cpu::empty_like(x), sum = dense(residual), rstd = empty_per_row(x);
  run(x, sum, weight, eps, weight_offset, y, sum, rstd);
  if (!residual.is_contiguous()) torch::stable::copy_(residual, sum);
  return {y, rstd};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("add_rms_norm", kernel<&add_rms_norm>);
  m.impl("add_rms_norm_", kernel<&add_rms_norm_in_place>);
}

}  // namespace metalcore::cpu
