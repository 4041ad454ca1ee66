// SPDX-License-Identifier: MIT
// Numbers as sums of two values, high and low, of which float64 holds the 53 leading bits.
#pragma once

#include <cmath>

#include "../common/tensor.h"

namespace metalcore::precise {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

using Pair = std::tuple<Tensor, Tensor>;

inline void expect_pair(const char* op, const Tensor& high, const Tensor& low) {
  STD_TORCH_CHECK(
      high.scalar_type() == ScalarType::Float || high.scalar_type() == ScalarType::Double, op,
      ": numbers must be pairs of float32, or of float64");
  STD_TORCH_CHECK(low.scalar_type() == high.scalar_type() && cpu::same_sizes(high, low), op,
                  ": high and low must have one shape and dtype");
}

// Calls body(T()) with the type of a pair that was expected.
template <typename Body>
void dispatch_pair(const Tensor& high, Body body) {
  high.scalar_type() == ScalarType::Float ? body(float()) : body(double());
}

template <typename T>
struct Values {
  const T *high, *low;

  Values(const Tensor& h, const Tensor& l) : high(cpu::data<T>(h)), low(cpu::data<T>(l)) {}
  double operator[](int64_t i) const { return double(high[i]) + double(low[i]); }
};

template <typename T>
struct Results {
  T *high, *low;

  Results(const Tensor& h, const Tensor& l)
      : high(cpu::mutable_data<T>(h)), low(cpu::mutable_data<T>(l)) {}

  void set(int64_t i, double first, double second = 0) const {
    // of two doubles that do not overlap, the first rounds as the sum does, but for ties
    high[i] = T(first);
    low[i] = std::isfinite(high[i]) ? T((first - double(high[i])) + second) : T(0);
  }
};

}  // namespace metalcore::precise
