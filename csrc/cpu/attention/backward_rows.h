// SPDX-License-Identifier: MIT
// What attention's gradient computes of each row before the products, and of each sink after them.
#pragma once

#include "problem.h"

namespace metalcore::cpu::tiles {

// dO.O - dlse of each row.
template <typename T>
void row_products(const Sizes& s, const Tensor& dout, const Tensor& out, const Acc<T>* dlse,
                  Acc<T>* delta) {
  const Heads<const T> d(dout), o(out);
  const int64_t rows = s.batch * s.heads * s.queries;
  parallel_for(0, rows, grain_rows(s.value_size), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t b = r / (s.heads * s.queries), h = r / s.queries % s.heads, t = r % s.queries;
      const T *x = d.at(b, h, t), *y = o.at(b, h, t);
      delta[r] = simd::sum_over<T>(s.value_size, [&](int64_t i, auto elements) {
        return simd::load(x + i, elements) * simd::load(y + i, elements);
      });
      if (dlse) delta[r] -= dlse[r];
    }
  });
}

// -sum over rows of exp(sink - lse) * delta, for each head.
template <typename A>
Tensor sink_gradients(const Problem<A>& problem, const std::optional<Tensor>& sinks, const A* lse,
                      const A* delta) {
  const Sizes& s = problem.sizes;
  const int64_t heads = sinks ? s.heads : 0;
  const ScalarType sums = std::is_same_v<A, double> ? ScalarType::Double : ScalarType::Float;
  Tensor d = empty(&heads, 1, sums);
  for (int64_t h = 0; h < heads; ++h) {
    double total = 0;
    for (int64_t b = 0; b < s.batch; ++b) {
      for (int64_t t = 0; t < s.queries; ++t) {
        const int64_t r = (b * s.heads + h) * s.queries + t;
        if (lse[r] != kHidden<A>) total -= std::exp(problem.sinks[h] - lse[r]) * delta[r];
      }
    }
    mutable_data<A>(d)[h] = A(total);
  }
  return sinks ? to_dtype(d, sinks->scalar_type()) : d;
}

}  // namespace metalcore::cpu::tiles
