// SPDX-License-Identifier: MIT
// A X = B on the CPU, by the factor of A = L L^T or A = U^T U: two triangular systems in turn.

#include "systems.h"

namespace metalcore::cpu {
namespace {

Tensor cholesky_solve(const Tensor& B, const Tensor& L, bool upper) {
  return solve_systems(
      "cholesky_solve", L, B,
      {{.lower = !upper, .transpose = upper}, {.lower = !upper, .transpose = !upper}});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("cholesky_solve", kernel<&cholesky_solve>);
}

}  // namespace metalcore::cpu
