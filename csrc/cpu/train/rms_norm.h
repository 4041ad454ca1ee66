// SPDX-License-Identifier: MIT
// What rms_norm and add_rms_norm share: the scale of a row, and its last pass.
#pragma once

#include <cmath>
#include <vector>

#include "../common/tensor.h"

namespace metalcore::cpu {

// weight_offset + weight (1 where there is no weight), [n], in the accumulation type A.
template <typename A>
class Scale {
 public:
  Scale(const std::optional<Tensor>& weight, double offset, int64_t n, const char* op) {
    if (!weight) {
      copy_.assign(n, A(1));
      return;
    }
    const Tensor w = dense(*weight);
    dispatch_float(w.scalar_type(), op, [&](auto type) {
      using W = decltype(type);
      if constexpr (std::is_same_v<W, A>) {
        if (offset == 0) {
          keep_ = w;
          return;
        }
      }
      copy_.resize(n);
      const W* from = data<W>(w);
      if constexpr (std::is_same_v<simd::Acc<W>, A>) {
        simd::for_each_register<A>(n, [&](int64_t i, auto lanes) {
          simd::store(copy_.data() + i, simd::load(from + i, lanes) + A(offset), lanes);
        });
      } else {
        for (int64_t i = 0; i < n; ++i) copy_[i] = A(from[i]) + A(offset);
      }
    });
  }

  const A* get() const { return keep_ ? data<A>(*keep_) : copy_.data(); }

 private:
  std::optional<Tensor> keep_;
  std::vector<A> copy_;
};

template <typename A>
A reciprocal_rms(A sum_of_squares, int64_t n, A eps) {
  return 1 / std::sqrt(sum_of_squares / A(n) + eps);
}

// y = x * rstd * scale, [n]
template <typename T, typename A = simd::Acc<T>>
void scale_row(const T* x, A rstd, const A* scale, int64_t n, T* y) {
  simd::for_each_register<A>(n, [&](int64_t i, auto lanes) {
    simd::store(y + i, simd::load(x + i, lanes) * rstd * simd::load(scale + i, lanes), lanes);
  });
}

// An accumulation-type tensor of x's leading dimensions, one value per row.
inline Tensor empty_per_row(const Tensor& x) {
  return new_empty(x, x.sizes().slice(0, x.dim() - 1), accumulate_dtype(x.scalar_type()));
}

}  // namespace metalcore::cpu
