// SPDX-License-Identifier: MIT
// Dot products of rows, and with `root` their square roots: norms. Products of float32 and narrower
// values are exact in double; one of doubles is two of them.

#include "rows.h"

namespace metalcore::precise {
namespace {

inline DoubleVec fused_product(DoubleVec x, DoubleVec y, DoubleVec minus) {
#if defined(__AVX512F__)
  return (DoubleVec)_mm512_fmsub_pd((__m512d)x, (__m512d)y, (__m512d)minus);
#elif defined(__AVX2__)
  return (DoubleVec)_mm256_fmsub_pd((__m256d)x, (__m256d)y, (__m256d)minus);
#elif defined(__aarch64__)
  return (DoubleVec)vfmaq_f64(-(float64x2_t)minus, (float64x2_t)x, (float64x2_t)y);
#else
  // by halves of 26 bits (Dekker), for values up to 2^990
  const double split = 134217729.0;
  const DoubleVec a = x * split, b = y * split;
  const DoubleVec x_high = a - (a - x), y_high = b - (b - y);
  const DoubleVec x_low = x - x_high, y_low = y - y_high;
  return ((x_high * y_high - minus) + x_high * y_low + x_low * y_high) + x_low * y_low;
#endif
}

constexpr int kSplitAbove = 990;

template <typename V>
void add_block(Exact& sum, const V* x, const V* y, int64_t count) {
  const Range of_x = range_of(x, count), of_y = range_of(y, count);
  const int above = of_x.above + of_y.above, below = of_x.below + of_y.below;
  bool is_done = of_x.is_finite && of_y.is_finite;
  if constexpr (std::is_same_v<V, float>) {
    is_done = is_done && add_exactly(sum, above, below, count, [&](int64_t i, const auto& add) {
                add(doubles(x + i) * doubles(y + i));
              });
  } else {
    // the last bit of a product is one of a double, and each is two terms
    is_done = is_done && below >= -1074 && std::max(of_x.above, of_y.above) <= kSplitAbove;
    for (int64_t first = 0; is_done && first < count; first += kBlock / 2) {
      const int64_t some = std::min(kBlock / 2, count - first);
      is_done = add_exactly(sum, above, below, some, [&](int64_t i, const auto& add) {
        const DoubleVec a = doubles(x + first + i), b = doubles(y + first + i), product = a * b;
        add(product);
        add(fused_product(a, b, product));
      });
    }
  }
  if (is_done) return;
  for (int64_t i = 0; i < count; ++i) sum.add_product(x[i], y[i]);
}

template <typename T>
TwoDoubles dot_of(const T* x, const T* y, int64_t n, bool twofold, bool in_parallel) {
  return sum_of_parts<TwoDoubles>(n, in_parallel, [&](auto& sum, int64_t first, int64_t count) {
    Widened<T> of_x(x + first), of_y(y + first);
    Lanes<false> plain;
    Lanes<true> pairs;
    for (int64_t i = 0; i < count; i += kBlock) {
      const int64_t some = std::min(kBlock, count - i);
      const auto *a = of_x.block(i, some), *b = of_y.block(i, some);
      if (twofold) {
        for_each_register(some, [&](int64_t j, int chain) {
          const DoubleVec u = doubles(a + j), v = doubles(b + j), product = u * v;
          pairs.add(chain, product);
          plain.add(chain, fused_product(u, v, product));
        });
      } else {
        for_each_register(
            some, [&](int64_t j, int chain) { plain.add(chain, doubles(a + j) * doubles(b + j)); });
      }
    }
    sum = plain.total();
    if (twofold) {
      const double lost = sum.value();
      sum = pairs.total();
      sum.low += lost;
    }
  });
}

template <typename T>
Exact exact_dot_of(const T* x, const T* y, int64_t n, bool in_parallel) {
  return sum_of_parts<Exact>(n, in_parallel, [&](auto& sum, int64_t first, int64_t count) {
    Widened<T> of_x(x + first), of_y(y + first);
    for (int64_t i = 0; i < count; i += kBlock) {
      const int64_t some = std::min(kBlock, count - i);
      add_block(sum, of_x.block(i, some), of_y.block(i, some), some);
    }
  });
}

template <typename T>
T dot_row(const T* x, const T* y, int64_t n, int64_t level, bool root, bool in_parallel) {
  if (level == kExact) {
    const Exact sum = exact_dot_of(x, y, n, in_parallel);
    return root ? sum.root<T>() : sum.sum<T>(false);
  }
  const bool twofold = std::is_same_v<T, double> && level == kCompensated;
  const TwoDoubles sum = dot_of(x, y, n, twofold, in_parallel);
  return from_double<T>(root ? sum.root() : sum.value());
}

Tensor precise_dot(const Tensor& x_in, const Tensor& y_in, int64_t level, bool root) {
  const Tensor x = cpu::dense(x_in), y = cpu::dense(y_in);
  cpu::expect_rows("precise_dot", x);
  cpu::expect_like("precise_dot", "y", y, x);
  cpu::expect_choice("precise_dot", "level", level, kLevelCount);
  const int64_t n = x.size(-1);
  Tensor result = empty_for_rows(x);
  metalcore_variant = name_of(level);
  cpu::dispatch_float(x.scalar_type(), "precise_dot", [&](auto type) {
    using T = decltype(type);
    const T *xp = cpu::data<T>(x), *yp = cpu::data<T>(y);
    T* rp = cpu::mutable_data<T>(result);
    for_each_row(result.numel(), n, [&](int64_t r, bool in_parallel) {
      rp[r] = dot_row(xp + r * n, yp + r * n, n, level, root, in_parallel);
    });
  });
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metalcore_kernels, CPU, m) {
  m.impl("precise_dot", cpu::kernel<&precise_dot>);
}

}  // namespace metalcore::precise
