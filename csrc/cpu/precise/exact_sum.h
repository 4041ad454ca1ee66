// SPDX-License-Identifier: MIT
// The exact sum of a row.
#pragma once

#include "rows.h"

namespace metalcore::precise {

// A block of values, exactly.
template <typename V>
inline void add_block(Exact& sum, const V* x, int64_t count) {
  Range range;
  if constexpr (std::is_same_v<V, float>) {
    double block;
    range = range_and_sum_of(x, count, block);
    // nearly always: their sum in double as they are is not rounded
    if (range.is_finite && range.above - range.below <= kPartBits) return sum.add(block);
  } else {
    range = range_of(x, count);
  }
  const auto term = [&](int64_t i, const auto& add) { add(doubles(x + i)); };
  if (range.is_finite && add_exactly(sum, range.above, range.below, count, term)) return;
  for (int64_t i = 0; i < count; ++i) sum.add(static_cast<double>(x[i]));
}

template <typename T>
Exact exact_sum_of(const T* x, int64_t n, bool in_parallel) {
  return sum_of_parts<Exact>(n, in_parallel, [&](auto& sum, int64_t first, int64_t count) {
    Widened<T> values(x + first);
    for (int64_t i = 0; i < count; i += kBlock) {
      const int64_t some = std::min(kBlock, count - i);
      add_block(sum, values.block(i, some), some);
    }
  });
}

// Whether a sum of zero is that of -0 alone.
template <typename T>
bool is_all_negative_zero(const T* x, int64_t n) {
  return n > 0 && std::all_of(x, x + n, [](T v) {
           const auto wide = static_cast<simd::Acc<T>>(v);
           return wide == 0 && std::signbit(wide);
         });
}

}  // namespace metalcore::precise
