// SPDX-License-Identifier: MIT
// Calls of torch's own ops, for the shapes at which they are ahead.
#pragma once

#include "tensor.h"

namespace metalcore::cpu {

// torch's op `name` with all arguments of its schema; the first outputs as tensors.
//   auto [q, r] = aten<2>("aten::linalg_qr", "", a, std::string("reduced"));
template <size_t Outputs, typename... Args>
std::array<Tensor, Outputs> aten(const char* name, const char* overload, const Args&... args) {
  std::array<StableIValue, std::max(sizeof...(Args), Outputs)> stack{
      torch::stable::detail::from(args)...};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  return [&]<size_t... I>(std::index_sequence<I...>) {
    return std::array<Tensor, Outputs>{torch::stable::detail::to<Tensor>(stack[I])...};
  }(std::make_index_sequence<Outputs>());
}

inline Tensor to_dtype(const Tensor& x, ScalarType dtype) {
  return x.scalar_type() == dtype ? x : torch::stable::to(x, dtype);
}

}  // namespace metalcore::cpu
