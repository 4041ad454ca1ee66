// SPDX-License-Identifier: MIT
// LayerNorm on the CPU. Rows are independent, so each thread takes a block of them.
//   v = (x - mean) * rstd,  y = v * weight + bias,  g = dy * weight
//   dx = rstd * (g - mean(g) - v * mean(g * v)) + dsum,  dweight = sum(dy * v),  dbias = sum(dy)

#include "layer_norm.h"

#include <memory>
#include <tuple>

namespace metalcore::cpu {
namespace {

std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x_in, std::optional<Tensor> weight,
                                              std::optional<Tensor> bias, double eps) {
  expect_rows("layer_norm", x_in);
  const Tensor x = dense(x_in);
  Tensor y = cpu::empty_like(x), mean = empty_per_row(x), rstd = empty_per_row(x);
  dispatch_float(x.scalar_type(), "layer_norm", [&](auto type) {
    layer_norm_rows<decltype(type)>("layer_norm", x, nullptr, weight, bias, eps, y, nullptr, mean,
                                    rstd);
  });
  return {y, mean, rstd};
}

// What the gradients of rows of n are computed from and written to. dsum may be null.
template <typename T>
struct BackwardRows {
  const T *dy, *x;
  const Acc<T>*scale, *mean, *rstd;
  const T* dsum;
  T* dx;
  int64_t n;
  bool streams;

  // Adds the row's part to dweight and dbias, unless they are null.
  void operator()(int64_t r, Acc<T>* dweight, Acc<T>* dbias) const {
    using A = Acc<T>;
    // by value: after a store, members are read again
    const T *g_row = dy + r * n, *x_row = x + r * n, *add = dsum ? dsum + r * n : nullptr;
    const T *g_next = g_row + n, *x_next = x_row + n;
    T* out = dx + r * n;
    const A center = mean[r], *w = scale;
    const auto grad = [=](int64_t i, auto elements) {
      return simd::load(g_row + i, elements) * load_scale<T>(w + i, elements);
    };
    const A sum = simd::sum_over<T>(n, grad);
    const A dot = simd::sum_over<T>(n, [=](int64_t i, auto elements) {
      return grad(i, elements) * (simd::load(x_row + i, elements) - center);
    });
    const A scaled = rstd[r], even = sum / A(n), pull = dot * scaled * scaled / A(n);
    write_row<T>(n, streams, [=](int64_t i, auto elements, auto put) {
      __builtin_prefetch(g_next + i);
      __builtin_prefetch(x_next + i);
      const auto g = simd::load(g_row + i, elements);
      const auto v = simd::load(x_row + i, elements) - center;
      auto d = (g * load_scale<T>(w + i, elements) - even - v * pull) * scaled;
      if (add) d += simd::load(add + i, elements);
      put(out + i, d);
      if (dweight) simd::store(dweight + i, simd::load(dweight + i) + g * (v * scaled));
      if (dbias) simd::store(dbias + i, simd::load(dbias + i) + g);
    });
  }
};

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& dy_in, const Tensor& x_in,
                                                       std::optional<Tensor> weight,
                                                       std::optional<Tensor> bias,
                                                       const Tensor& mean_in, const Tensor& rstd_in,
                                                       std::optional<Tensor> dsum_in,
                                                       bool need_dweight, bool need_dbias) {
  const char* op = "layer_norm_backward";
  expect_rows(op, x_in);
  const Tensor dy = dense(dy_in), x = dense(x_in), mean = dense(mean_in), rstd = dense(rstd_in);
  expect_like(op, "dy", dy, x);
  expect_like(op, "mean", mean, empty_per_row(x));
  expect_like(op, "rstd", rstd, mean);
  std::optional<Tensor> dsum;
  if (dsum_in) {
    dsum = dense(*dsum_in);
    expect_like(op, "dsum", *dsum, x);
  }
  const int64_t n = x.size(-1);
  STD_TORCH_CHECK(
      !bias || (bias->dim() == 1 && bias->numel() == n && is_float(bias->scalar_type())), op,
      ": bias must have as many values as a row of x");
  const RowBlocks blocks(rstd.numel());
  const bool sums_weight = weight && need_dweight, sums_bias = bias && need_dbias;

  constexpr int64_t kNothing = 0;
  const auto gradient_of = [&](bool wanted, const std::optional<Tensor>& t) {
    return wanted ? cpu::empty_like(*t) : empty(&kNothing, 1, dy.scalar_type());
  };
  Tensor dx = cpu::empty_like(x);
  Tensor dweight = gradient_of(sums_weight, weight), dbias = gradient_of(sums_bias, bias);
  dispatch_float(x.scalar_type(), op, [&](auto type) {
    using T = decltype(type);
    using A = Acc<T>;
    const Scale<T> scale(weight, 0, n, op);
    // Whole Pairs per block, so that a row's end can be added without care; dweight, then dbias.
    const int64_t width = (n + simd::kStep<T> - 1) / simd::kStep<T> * simd::kStep<T>;
    const int64_t step = width * (sums_weight + sums_bias);
    const auto partial = std::make_unique_for_overwrite<A[]>(blocks.count * step);
    A* const bias_partial = partial.get() + (sums_weight ? width : 0);
    const bool streams = streams_past_cache<T>(dx, n);
    metalcore_variant = streams ? "blocks_streamed" : "blocks";
    const BackwardRows<T> backward{data<T>(dy),
                                   data<T>(x),
                                   scale.get(),
                                   data<A>(mean),
                                   data<A>(rstd),
                                   dsum ? data<T>(*dsum) : nullptr,
                                   mutable_data<T>(dx),
                                   n,
                                   streams};
    parallel_for(0, blocks.count, grain_rows(n * blocks.rows_each),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t b = begin; b < end; ++b) {
                     std::fill_n(partial.get() + b * step, step, A(0));
                     A* w = sums_weight ? partial.get() + b * step : nullptr;
                     A* s = sums_bias ? bias_partial + b * step : nullptr;
                     for (int64_t r = blocks.first(b); r < blocks.last(b); ++r) backward(r, w, s);
                   }
                   simd::end_stream();
                 });
    if (sums_weight) sum_blocks<T>(partial.get(), blocks.count, step, dweight);
    if (sums_bias) sum_blocks<T>(bias_partial, blocks.count, step, dbias);
  });
  return {dx, dweight, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("layer_norm", kernel<&layer_norm>);
  m.impl("layer_norm_backward", kernel<&layer_norm_backward>);
}

}  // namespace metalcore::cpu
