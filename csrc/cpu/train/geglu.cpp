// SPDX-License-Identifier: MIT
// GEGLU on the CPU: y = gelu(gate) * up.

#include "activation.h"

namespace metalcore::cpu {
namespace {

Tensor geglu(const Tensor& gate, const Tensor& up, bool tanh) {
  return tanh ? gated("geglu", gate, up, GeluTanh()) : gated("geglu", gate, up, Gelu());
}

std::tuple<Tensor, Tensor> geglu_backward(const Tensor& dy, const Tensor& gate, const Tensor& up,
                                          bool tanh) {
  return tanh ? gated_backward("geglu_backward", dy, gate, up, GeluTanh())
              : gated_backward("geglu_backward", dy, gate, up, Gelu());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("geglu", kernel<&geglu>);
  m.impl("geglu_backward", kernel<&geglu_backward>);
}

}  // namespace metalcore::cpu
