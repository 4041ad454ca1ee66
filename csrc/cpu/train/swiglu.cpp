// SPDX-License-Identifier: MIT
// SwiGLU on the CPU: y = silu(gate) * up.

#include "activation.h"

namespace metalcore::cpu {
namespace {

Tensor swiglu(const Tensor& gate, const Tensor& up) { return gated("swiglu", gate, up, Silu()); }

std::tuple<Tensor, Tensor> swiglu_backward(const Tensor& dy, const Tensor& gate, const Tensor& up) {
  return gated_backward("swiglu_backward", dy, gate, up, Silu());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("swiglu", kernel<&swiglu>);
  m.impl("swiglu_backward", kernel<&swiglu_backward>);
}

}  // namespace metalcore::cpu
