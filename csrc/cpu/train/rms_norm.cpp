// SPDX-License-Identifier: MIT
// RMSNorm on the CPU. Rows are independent, so each thread takes a block of them.
//   y = x * rstd * scale,  rstd = 1 / sqrt(mean(x^2) + eps),  scale = weight_offset + weight
//   dx = rstd * (dy * scale - x * rstd^2 * mean(dy * scale * x)) + dsum
//   dweight = sum(dy * x * rstd)

#include <memory>
#include <tuple>

#include "norm.h"

namespace metalcore::cpu {
namespace {

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x_in, std::optional<Tensor> weight, double eps,
                                    double weight_offset) {
  expect_rows("rms_norm", x_in);
  const Tensor x = dense(x_in);
  const int64_t n = x.size(-1);
  Tensor y = cpu::empty_like(x), rstd = empty_per_row(x);

  dispatch_float(x.scalar_type(), "rms_norm", [&](auto type) {
    using T = decltype(type);
    using A = Acc<T>;
    const Scale<T> scale(weight, weight_offset, n, "rms_norm");
    const T* xp = data<T>(x);
    T* yp = mutable_data<T>(y);
    A* rp = mutable_data<A>(rstd);
    const bool streams = streams_past_cache<T>(y, n);
    metalcore_variant = streams ? "rows_streamed" : "rows";
    parallel_for(0, rstd.numel(), grain_rows(n), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* row = xp + r * n;
        const A squares = simd::sum_over<T>(n, [&](int64_t i, auto elements) {
          const auto v = simd::load(row + i, elements);
          return v * v;
        });
        rp[r] = reciprocal_rms(squares, n, A(eps));
        scale_row(row, rp[r], scale.get(), n, yp + r * n, streams);
      }
      simd::end_stream();
    });
  });
  return {y, rstd};
}

// What the gradients of rows of n are computed from and written to. dsum may be null.
template <typename T>
struct BackwardRows {
  const T *dy, *x;
  const Acc<T>*scale, *rstd;
  const T* dsum;
  T* dx;
  int64_t n;
  bool streams;

  // Adds the row's part to dweight, unless that is null.
  void operator()(int64_t r, Acc<T>* dweight) const {
    // by value: after a store, members are read again
    const T *g_row = dy + r * n, *x_row = x + r * n, *add = dsum ? dsum + r * n : nullptr;
    const T *g_next = g_row + n, *x_next = x_row + n;
    T* out = dx + r * n;
    const Acc<T>* w = scale;
    const Acc<T> dot = simd::sum_over<T>(n, [=](int64_t i, auto elements) {
      return simd::load(g_row + i, elements) * load_scale<T>(w + i, elements) *
             simd::load(x_row + i, elements);
    });
    const Acc<T> r_rms = rstd[r], pull = dot * r_rms * r_rms / Acc<T>(n);
    write_row<T>(n, streams, [=](int64_t i, auto elements, auto put) {
      __builtin_prefetch(g_next + i);
      __builtin_prefetch(x_next + i);
      const auto g = simd::load(g_row + i, elements), v = simd::load(x_row + i, elements);
      auto d = (g * load_scale<T>(w + i, elements) - v * pull) * r_rms;
      if (add) d += simd::load(add + i, elements);
      put(out + i, d);
      if (dweight) simd::store(dweight + i, simd::load(dweight + i) + g * (v * r_rms));
    });
  }
};

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& dy_in, const Tensor& x_in,
                                             std::optional<Tensor> weight, const Tensor& rstd_in,
                                             double weight_offset, std::optional<Tensor> dsum_in,
                                             bool need_dweight) {
  expect_rows("rms_norm_backward", x_in);
  const Tensor dy = dense(dy_in), x = dense(x_in), rstd = dense(rstd_in);
  expect_like("rms_norm_backward", "dy", dy, x);
  expect_like("rms_norm_backward", "rstd", rstd, empty_per_row(x));
  std::optional<Tensor> dsum;
  if (dsum_in) {
    dsum = dense(*dsum_in);
    expect_like("rms_norm_backward", "dsum", *dsum, x);
  }
  const int64_t n = x.size(-1);
  const RowBlocks blocks(rstd.numel());
  const bool sums = weight && need_dweight;

  constexpr int64_t kNothing = 0;
  Tensor dx = cpu::empty_like(x);
  Tensor dweight = sums ? cpu::empty_like(*weight) : empty(&kNothing, 1, dy.scalar_type());
  dispatch_float(x.scalar_type(), "rms_norm_backward", [&](auto type) {
    using T = decltype(type);
    using A = Acc<T>;
    const Scale<T> scale(weight, weight_offset, n, "rms_norm_backward");
    // Whole Pairs per block, so that a row's end can be added without care.
    const int64_t width = (n + simd::kStep<T> - 1) / simd::kStep<T> * simd::kStep<T>;
    const auto partial = std::make_unique_for_overwrite<A[]>(sums ? blocks.count * width : 0);
    const bool streams = streams_past_cache<T>(dx, n);
    metalcore_variant = streams ? "blocks_streamed" : "blocks";
    const BackwardRows<T> backward{data<T>(dy),
                                   data<T>(x),
                                   scale.get(),
                                   data<A>(rstd),
                                   dsum ? data<T>(*dsum) : nullptr,
                                   mutable_data<T>(dx),
                                   n,
                                   streams};
    parallel_for(0, blocks.count, grain_rows(n * blocks.rows_each),
                 [&](int64_t first, int64_t last) {
                   for (int64_t b = first; b < last; ++b) {
                     A* dweight_part = sums ? partial.get() + b * width : nullptr;
                     if (sums) std::fill_n(dweight_part, width, A(0));
                     for (int64_t r = blocks.first(b); r < blocks.last(b); ++r)
                       backward(r, dweight_part);
                   }
                   simd::end_stream();
                 });
    if (sums) sum_blocks<T>(partial.get(), blocks.count, width, dweight);
  });
  return {dx, dweight};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("rms_norm", kernel<&rms_norm>);
  m.impl("rms_norm_backward", kernel<&rms_norm_backward>);
}

}  // namespace metalcore::cpu
