// SPDX-License-Identifier: MIT
// Soft cap on the CPU: y = cap * tanh(x / cap).

#include "activation.h"

namespace metalcore::cpu {
namespace {

struct SoftCap {
  double cap;

  template <typename T, typename V>
  V value(V x) const {
    using A = simd::Lane<V>;
    return simd::Tanh<V>(x * A(1 / cap)).value * A(cap);
  }

  template <typename T, typename V>
  void value_and_slope(V x, V& value, V& slope) const {
    using A = simd::Lane<V>;
    const simd::Tanh<V> t(x * A(1 / cap));
    value = t.value * A(cap);
    slope = t.slope;
  }
};

Tensor soft_cap(const Tensor& x, double cap) {
  return activate("soft_cap", x, std::nullopt, SoftCap{cap});
}

Tensor soft_cap_backward(const Tensor& dy, const Tensor& x, double cap) {
  return activate_backward("soft_cap_backward", dy, x, std::nullopt, SoftCap{cap});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("soft_cap", kernel<&soft_cap>);
  m.impl("soft_cap_backward", kernel<&soft_cap_backward>);
}

}  // namespace metalcore::cpu
