// SPDX-License-Identifier: MIT
// Rotary position embedding of one row: y[j] = x[j] * cos[j] + x[partner(j)] * sin[j].
#pragma once

#include "../common/tensor.h"

namespace metalcore::cpu {

using simd::Acc;

struct Rotation {
  int64_t size, rotary, half;
  bool interleaved, inverse;
};

// Each element with its neighbour's value: 2i and 2i + 1 change places.
template <typename T>
simd::Pair<Acc<T>> swap_neighbours(simd::Pair<Acc<T>> v) {
  if constexpr (std::is_same_v<T, simd::BFloat16>) {
    return {v.second, v.first};
  } else {
    simd::Pair<Acc<T>> out;
    for (int64_t i = 0; i < simd::kLanes<Acc<T>>; ++i) {
      out.first[i] = v.first[i ^ 1];
      out.second[i] = v.second[i ^ 1];
    }
    return out;
  }
}

template <typename T, typename Put>
void rotate_row(const Rotation& how, const T* x, const Acc<T>* cos, const Acc<T>* sin,
                int64_t second, T* y, Put put) {
  if (how.interleaved) {
    simd::for_each_pair<T>(how.rotary, [&](int64_t i, auto elements) {
      const auto v = simd::load(x + i, elements);
      put(y + i, v * simd::load(cos + i) + swap_neighbours<T>(v) * simd::load(sin + i), elements);
    });
  } else {
    simd::for_each_pair<T>(how.half, [&](int64_t i, auto elements) {
      const auto a = simd::load(x + i, elements), b = simd::load(x + how.half + i, elements);
      put(y + i, a * simd::load(cos + i) + b * simd::load(sin + i), elements);
      put(y + how.half + i, b * simd::load(cos + second + i) + a * simd::load(sin + second + i),
          elements);
    });
  }
  simd::for_each_pair<T>(how.size - how.rotary, [&](int64_t i, auto elements) {
    put(y + how.rotary + i, simd::load(x + how.rotary + i, elements), elements);
  });
}

}  // namespace metalcore::cpu
