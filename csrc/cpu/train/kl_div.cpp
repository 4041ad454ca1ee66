// SPDX-License-Identifier: MIT
// Kullback-Leibler divergence on the CPU: p (log p - input), where the target is p or log p.

#include "divergence.h"

namespace metalcore::cpu {
namespace {

template <bool kLog>
struct KlDiv {
  template <typename V>
  V value(V x, V t) const {
    if constexpr (kLog) return simd::exp(t) * (t - x);
    return times(t, simd::log(t)) - t * x;
  }

  template <typename V>
  std::array<V, 2> slopes(V x, V t) const {
    if constexpr (kLog) {
      const V p = simd::exp(t);
      return {-p, p * (t - x + 1)};
    } else {
      return {-t, t == 0 ? V{} : simd::log(t) + 1 - x};
    }
  }
};

Tensor kl_div(const Tensor& input, const Tensor& target, bool log_target, bool reduce,
              double scale) {
  if (log_target) {
    return divergence("kl_div", input, target, reduce, scale, [](auto) { return KlDiv<true>(); });
  }
  return divergence("kl_div", input, target, reduce, scale, [](auto) { return KlDiv<false>(); });
}

std::tuple<Tensor, Tensor> kl_div_backward(const Tensor& dloss, const Tensor& input,
                                           const Tensor& target, bool log_target, bool reduce,
                                           double scale, bool need_dtarget) {
  const auto run = [&](const auto& make) {
    return divergence_backward("kl_div_backward", dloss, input, target, reduce, scale, need_dtarget,
                               make);
  };
  return log_target ? run([](auto) { return KlDiv<true>(); })
                    : run([](auto) { return KlDiv<false>(); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("kl_div", kernel<&kl_div>);
  m.impl("kl_div_backward", kernel<&kl_div_backward>);
}

}  // namespace metalcore::cpu
