// SPDX-License-Identifier: MIT
// GELU on the CPU, exact or by tanh, alone and of x + bias.

#include "activation.h"

namespace metalcore::cpu {
namespace {

Tensor gelu(const Tensor& x, bool tanh) {
  return tanh ? activate("gelu", x, std::nullopt, GeluTanh())
              : activate("gelu", x, std::nullopt, Gelu());
}

Tensor gelu_backward(const Tensor& dy, const Tensor& x, bool tanh) {
  return tanh ? activate_backward("gelu_backward", dy, x, std::nullopt, GeluTanh())
              : activate_backward("gelu_backward", dy, x, std::nullopt, Gelu());
}

Tensor bias_gelu(const Tensor& x, const Tensor& bias, bool tanh) {
  return tanh ? activate("bias_gelu", x, bias, GeluTanh()) : activate("bias_gelu", x, bias, Gelu());
}

Tensor bias_gelu_backward(const Tensor& dy, const Tensor& x, const Tensor& bias, bool tanh) {
  return tanh ? activate_backward("bias_gelu_backward", dy, x, bias, GeluTanh())
              : activate_backward("bias_gelu_backward", dy, x, bias, Gelu());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("gelu", kernel<&gelu>);
  m.impl("gelu_backward", kernel<&gelu_backward>);
  m.impl("bias_gelu", kernel<&bias_gelu>);
  m.impl("bias_gelu_backward", kernel<&bias_gelu_backward>);
}

}  // namespace metalcore::cpu
