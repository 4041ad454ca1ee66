// SPDX-License-Identifier: MIT
// Running sums of rows: each of them what a sum up to there is, at the same level.

#include "rows.h"

namespace metalcore::precise {
namespace {

template <typename T>
void cumsum_row(const T* x, int64_t n, int64_t level, T* y) {
  const auto at = [&](int64_t i) { return static_cast<double>(static_cast<simd::Acc<T>>(x[i])); };
  if (level == kExact) {
    Exact sum;
    bool is_negative_zero = true;
    for (int64_t i = 0; i < n; ++i) {
      sum.add(at(i));
      is_negative_zero = is_negative_zero && at(i) == 0 && std::signbit(at(i));
      y[i] = sum.sum<T>(is_negative_zero);
    }
  } else if (std::is_same_v<T, double> && level == kCompensated) {
    TwoDoubles sum;
    for (int64_t i = 0; i < n; ++i) {
      sum.add(at(i));
      y[i] = from_double<T>(sum.value());
    }
  } else {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) y[i] = from_double<T>(sum += at(i));
  }
}

Tensor precise_cumsum(const Tensor& x_in, int64_t level) {
  const Tensor x = cpu::dense(x_in);
  cpu::expect_rows("precise_cumsum", x);
  cpu::expect_choice("precise_cumsum", "level", level, kLevelCount);
  const int64_t n = x.size(-1), rows = n == 0 ? 0 : x.numel() / n;
  Tensor y = cpu::empty_like(x);
  metalcore_variant = name_of(level);
  cpu::dispatch_float(x.scalar_type(), "precise_cumsum", [&](auto type) {
    using T = decltype(type);
    const T* xp = cpu::data<T>(x);
    T* yp = cpu::mutable_data<T>(y);
    cpu::parallel_for(0, rows, cpu::grain_rows(n), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) cumsum_row(xp + r * n, n, level, yp + r * n);
    });
  });
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("precise_cumsum", cpu::kernel<&precise_cumsum>);
}

}  // namespace metalcore::precise
