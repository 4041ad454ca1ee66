// SPDX-License-Identifier: MIT
// op(A) X = B on the CPU.

#include "systems.h"

namespace metalcore::cpu {
namespace {

Tensor trsm(const Tensor& A, const Tensor& B, bool lower, bool transpose, bool unit_diagonal) {
  return solve_systems("trsm", A, B, {{lower, transpose, unit_diagonal}});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) { m.impl("trsm", kernel<&trsm>); }

}  // namespace metalcore::cpu
