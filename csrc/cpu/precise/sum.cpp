// SPDX-License-Identifier: MIT
// Sums and means of rows. compensated: in float64, for float64 with what each addition loses;
// exact: see terms.h; float64: in float64.

#include "exact_sum.h"

namespace metalcore::precise {
namespace {

template <typename T, bool kTwofold>
TwoDoubles sum_of(const T* x, int64_t n, bool in_parallel) {
  return sum_of_parts<TwoDoubles>(n, in_parallel, [&](auto& sum, int64_t first, int64_t count) {
    Widened<T> values(x + first);
    Lanes<kTwofold> lanes;
    for (int64_t i = 0; i < count; i += kBlock) {
      const int64_t some = std::min(kBlock, count - i);
      const auto* block = values.block(i, some);
      for_each_register(some, [&](int64_t j, int chain) { lanes.add(chain, doubles(block + j)); });
    }
    sum = lanes.total();
  });
}

template <typename T>
T sum_row(const T* x, int64_t n, int64_t level, bool mean, bool in_parallel) {
  const int64_t divisor = mean ? n : 1;
  if (n == 0) return from_double<T>(mean ? std::numeric_limits<double>::quiet_NaN() : 0.0);
  if (level == kExact) {
    const T y = exact_sum_of(x, n, in_parallel).template quotient<T>(divisor, false);
    const bool is_zero = static_cast<simd::Acc<T>>(y) == 0;
    return is_zero && is_all_negative_zero(x, n) ? from_double<T>(-0.0) : y;
  }
  const TwoDoubles sum = std::is_same_v<T, double> && level == kCompensated
                             ? sum_of<T, true>(x, n, in_parallel)
                             : sum_of<T, false>(x, n, in_parallel);
  return from_double<T>(mean ? sum.quotient(n) : sum.value());
}

Tensor precise_sum(const Tensor& x_in, int64_t level, bool mean) {
  const Tensor x = cpu::dense(x_in);
  cpu::expect_rows("precise_sum", x);
  cpu::expect_choice("precise_sum", "level", level, kLevelCount);
  const int64_t n = x.size(-1);
  Tensor y = empty_for_rows(x);
  metalcore_variant = name_of(level);
  cpu::dispatch_float(x.scalar_type(), "precise_sum", [&](auto type) {
    using T = decltype(type);
    const T* xp = cpu::data<T>(x);
    T* yp = cpu::mutable_data<T>(y);
    for_each_row(y.numel(), n, [&](int64_t r, bool in_parallel) {
      yp[r] = sum_row(xp + r * n, n, level, mean, in_parallel);
    });
  });
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("precise_sum", cpu::kernel<&precise_sum>);
}

}  // namespace metalcore::precise
