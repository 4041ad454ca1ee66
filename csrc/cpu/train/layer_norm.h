// SPDX-License-Identifier: MIT
// LayerNorm of rows, which layer_norm and add_layer_norm share.
//   y = (x - mean) * rstd * weight + bias,  rstd = 1 / sqrt(mean((x - mean)^2) + eps)
#pragma once

#include "norm.h"

namespace metalcore::cpu {

// The rows of x, or of x + residual, which are then written to `sum`. The norm is that of the sum
// as it is stored, so that the backward pass sees the same numbers.
template <typename T>
void layer_norm_rows(const char* op, const Tensor& x, const Tensor* residual,
                     const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                     double eps, Tensor& y, Tensor* sum, Tensor& mean, Tensor& rstd) {
  using A = Acc<T>;
  const int64_t n = x.size(-1);
  const Scale<T> scale(weight, 0, n, op), shift(bias, 0, n, op, 0);
  const T *xp = data<T>(x), *bp = residual ? data<T>(*residual) : nullptr;
  T *yp = mutable_data<T>(y), *sp = sum ? mutable_data<T>(*sum) : nullptr;
  A *mp = mutable_data<A>(mean), *rp = mutable_data<A>(rstd);
  const bool streams = streams_past_cache<T>(y, n);
  metalcore_variant = streams ? "rows_streamed" : "rows";
  parallel_for(0, rstd.numel(), grain_rows(n), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* row = xp + r * n;
      const A total = simd::sum_over<T>(n, [&](int64_t i, auto elements) {
        auto v = simd::load(row + i, elements);
        if (bp) {
          T* sum = sp + r * n + i;
          simd::store(sum, v + simd::load(bp + r * n + i, elements), elements);
          v = simd::load(sum, elements);
        }
        return v;
      });
      if (bp) row = sp + r * n;
      const auto sum_around = [&](A center, auto power) {
        return simd::sum_over<T>(n, [&](int64_t i, auto elements) {
          return power(fill_rest<T>(simd::load(row + i, elements), elements, center) - center);
        });
      };
      const auto square = [](auto v) { return v * v; };
      A m = total / A(n), squares = sum_around(m, square);
      // so small a spread is lost in the rounding of the mean: once more, from the first value on,
      // which is exact for equal values
      if (squares * A(1 << 20) <= m * m * A(n)) {
        m = A(*row) + sum_around(A(*row), [](auto v) { return v; }) / A(n);
        squares = sum_around(m, square);
      }
      const A spread = reciprocal_rms(squares, n, A(eps));
      mp[r] = m;
      rp[r] = spread;
      const A *w = scale.get(), *b = shift.get();
      const T* next = xp + (r + 1) * n;
      T* out = yp + r * n;
      write_row<T>(n, streams, [=](int64_t i, auto elements, auto put) {
        __builtin_prefetch(next + i);
        const auto v = (simd::load(row + i, elements) - m) * spread;
        put(out + i, v * load_scale<T>(w + i, elements) + load_scale<T>(b + i, elements));
      });
    }
    simd::end_stream();
  });
}

}  // namespace metalcore::cpu
