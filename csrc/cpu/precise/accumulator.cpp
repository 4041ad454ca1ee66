// SPDX-License-Identifier: MIT
// Exact sums of rows as integers: their limbs, and what was among their terms.

#include "exact_sum.h"

namespace metalcore::precise {
namespace {

// After the limbs: NaN, infinity, its negative, a term other than -0, and the number of terms.
constexpr int64_t kWidth = kLimbs + 5;

Tensor precise_limbs(const Tensor& x_in) {
  const Tensor x = cpu::dense(x_in);
  cpu::expect_rows("precise_limbs", x);
  const int64_t n = x.size(-1), dim = x.dim();
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes[dim - 1] = kWidth;
  Tensor limbs = cpu::empty(sizes.data(), dim, cpu::ScalarType::Long);
  metalcore_variant = "limbs";
  cpu::dispatch_float(x.scalar_type(), "precise_limbs", [&](auto type) {
    using T = decltype(type);
    const T* xp = cpu::data<T>(x);
    int64_t* lp = cpu::mutable_data<int64_t>(limbs);
    for_each_row(limbs.numel() / kWidth, n, [&](int64_t r, bool in_parallel) {
      Exact sum = exact_sum_of(xp + r * n, n, in_parallel);
      sum.carry();
      int64_t* out = std::copy(sum.limbs().begin(), sum.limbs().end(), lp + r * kWidth);
      *out++ = sum.has_nan();
      *out++ = sum.has_above();
      *out++ = sum.has_below();
      *out++ = n > 0 && !is_all_negative_zero(xp + r * n, n);
      *out++ = n;
    });
  });
  return limbs;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("precise_limbs", cpu::kernel<&precise_limbs>);
}

}  // namespace metalcore::precise
