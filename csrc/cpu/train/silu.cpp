// SPDX-License-Identifier: MIT
// SiLU on the CPU: y = x / (1 + exp(-x)), alone and of x + bias.

#include "activation.h"

namespace metalcore::cpu {
namespace {

Tensor silu(const Tensor& x) { return activate("silu", x, std::nullopt, Silu()); }

Tensor silu_backward(const Tensor& dy, const Tensor& x) {
  return activate_backward("silu_backward", dy, x, std::nullopt, Silu());
}

Tensor bias_silu(const Tensor& x, const Tensor& bias) {
  return activate("bias_silu", x, bias, Silu());
}

Tensor bias_silu_backward(const Tensor& dy, const Tensor& x, const Tensor& bias) {
  return activate_backward("bias_silu_backward", dy, x, bias, Silu());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("silu", kernel<&silu>);
  m.impl("silu_backward", kernel<&silu_backward>);
  m.impl("bias_silu", kernel<&bias_silu>);
  m.impl("bias_silu_backward", kernel<&bias_silu_backward>);
}

}  // namespace metalcore::cpu
