// SPDX-License-Identifier: MIT
// Eigenvalues of one large symmetric matrix.
#pragma once

#include <array>
#include <cmath>

#include "../common/lanes.h"
#include "tridiagonal_large.h"
#include "tridiagonal_values.h"

namespace metalcore::cpu {

// A power of two, in two factors: it may overflow where its product with a value does not.
template <typename T>
struct PowerOfTwo {
  T first, second;

  explicit PowerOfTwo(int exponent)
      : first(std::ldexp(T(1), exponent / 2)), second(std::ldexp(T(1), exponent - exponent / 2)) {}
};

// The largest magnitude in the lower triangle of n rows; NaN where one is no number.
template <typename T>
T largest_below(const T* a, int64_t n) {
  using simd::Vec;
  Vec<T> most = {}, poison = {};
  for (int64_t i = 0; i < n; ++i) {
    simd::for_each_pair<T>(i + 1, [&](int64_t j, auto elements) {
      const auto x = simd::load(a + i * n + j, elements);
      most = lanes::max(lanes::abs(x.first), lanes::max(lanes::abs(x.second), most));
      poison += x.first * lanes::splat<T>(0) + x.second * lanes::splat<T>(0);
    });
  }
  if (lanes::any(poison != 0)) return std::numeric_limits<T>::quiet_NaN();
  T largest = 0;
  for (int64_t i = 0; i < simd::kLanes<T>; ++i) largest = std::max(largest, most[i]);
  return largest;
}

// The lower triangle of `a`, scaled by a power of two, and made tridiagonal.
template <typename T>
struct Reduced {
  static constexpr int64_t kTile = TridiagonalLarge<T>::kTile;
  const int64_t n, ld;
  const int exponent;
  const PowerOfTwo<double> back;
  const Tensor scaled;
  const TridiagonalLarge<T> form;

  Reduced(const T* a, int64_t n, T largest)
      : n(n),
        ld((n + kTile - 1) / kTile * kTile),
        exponent(std::ilogb(largest) + 1),
        back(exponent),
        scaled(scale(a)),
        form(mutable_data<T>(scaled), n, ld) {}

  // of reflections
  const T* row(int64_t i) const { return data<T>(scaled) + i * ld; }

 private:
  Tensor scale(const T* a) const {
    const PowerOfTwo<T> there(-exponent);
    const std::array<int64_t, 2> sizes = {n, ld};
    const Tensor out =
        cpu::empty(sizes.data(), 2, torch::headeronly::CppTypeToScalarType<T>::value);
    for (int64_t i = 0; i < n; ++i) {
      T* to = mutable_data<T>(out) + i * ld;
      for (int64_t j = 0; j <= i; ++j) to[j] = a[i * n + j] * there.first * there.second;
    }
    return out;
  }
};

// Ascending, from the lower triangle of `a`; false where it has a NaN or an inf, and NaN then.
template <typename T>
bool symmetric_values(const T* a, int64_t n, T* values) {
  const T largest = largest_below(a, n);
  if (!(largest > 0)) {
    std::fill_n(values, n, largest);
    return largest == 0;
  }
  const Reduced<T> reduced(a, n, largest);
  tridiagonal_values(reduced.form.diagonal, reduced.form.beside, values);
  for (int64_t i = 0; i < n; ++i) {
    values[i] = T(values[i] * reduced.back.first * reduced.back.second);
  }
  return true;
}

}  // namespace metalcore::cpu
