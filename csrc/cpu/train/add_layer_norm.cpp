// SPDX-License-Identifier: MIT
// Residual add and LayerNorm on the CPU: sum = x + residual, y = layer_norm(sum), row by row.

#include <tuple>

#include "layer_norm.h"

namespace metalcore::cpu {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm(const Tensor& x_in,
                                                          const Tensor& residual_in,
                                                          std::optional<Tensor> weight,
                                                          std::optional<Tensor> bias, double eps) {
  const char* op = "add_layer_norm";
  expect_rows(op, x_in);
  const Tensor x = dense(x_in), residual = dense(residual_in);
  expect_like(op, "residual", residual, x);
  Tensor y = cpu::empty_like(x), sum = cpu::empty_like(x);
  Tensor mean = empty_per_row(x), rstd = empty_per_row(x);
  dispatch_float(x.scalar_type(), op, [&](auto type) {
    layer_norm_rows<decltype(type)>(op, x, &residual, weight, bias, eps, y, &sum, mean, rstd);
  });
  return {y, sum, mean, rstd};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("add_layer_norm", kernel<&add_layer_norm>);
}

}  // namespace metalcore::cpu
