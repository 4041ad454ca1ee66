// SPDX-License-Identifier: MIT
// Generalised Jensen-Shannon divergence on the CPU, of log q (input) and log p (target):
//   b p (log p - log m) + (1 - b) q (log q - log m),  m = b p + (1 - b) q
// and its limits p (log p - log q) for b = 0 and q (log q - log p) for b = 1.

#include "divergence.h"

namespace metalcore::cpu {
namespace {

template <typename A>
struct Jsd {
  A beta;

  template <typename V>
  V value(V x, V y) const {
    const V q = simd::exp(x), p = simd::exp(y);
    if (beta == 0) return times(p, y - x);
    if (beta == 1) return times(q, x - y);
    const V m = simd::log(p * beta + q * (1 - beta));
    return times(p, y - m) * beta + times(q, x - m) * (1 - beta);
  }

  template <typename V>
  std::array<V, 2> slopes(V x, V y) const {
    const V q = simd::exp(x), p = simd::exp(y);
    if (beta == 0) return {-p, times(p, y - x + 1)};
    if (beta == 1) return {times(q, x - y + 1), -q};
    const V m = simd::log(p * beta + q * (1 - beta));
    return {times(q, x - m) * (1 - beta), times(p, y - m) * beta};
  }
};

auto with(double beta) {
  return [beta](auto zero) { return Jsd<decltype(zero)>{decltype(zero)(beta)}; };
}

Tensor jsd(const Tensor& input, const Tensor& target, double beta, bool reduce, double scale) {
  return divergence("jsd", input, target, reduce, scale, with(beta));
}

std::tuple<Tensor, Tensor> jsd_backward(const Tensor& dloss, const Tensor& input,
                                        const Tensor& target, double beta, bool reduce,
                                        double scale, bool need_dtarget) {
  return divergence_backward("jsd_backward", dloss, input, target, reduce, scale, need_dtarget,
                             with(beta));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("jsd", kernel<&jsd>);
  m.impl("jsd_backward", kernel<&jsd_backward>);
}

}  // namespace metalcore::cpu
