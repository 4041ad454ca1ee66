// SPDX-License-Identifier: MIT
// Terms of a sum as registers of double, and their exact sum at the speed of memory.
//
// The largest and smallest exponent of a block of 2048 terms say how many parts of a term suffice:
// K sums in double, of the bits that two neighbouring thresholds enclose, each so narrow that 2048
// of them add up without rounding. Floats of usual data need one, which is added up while exponents
// are looked at; other blocks are read twice. What has a wider range of exponents, or is not
// finite, is added term by term.
#pragma once

#include <algorithm>
#include <vector>

#include "exact.h"

namespace metalcore::precise {

using simd::DoubleVec;

constexpr int64_t kLanes = simd::kLanes<double>;
constexpr int64_t kBlock = 2048;
constexpr int kBlockBits = 11;
// Bits that terms may have for a block's sum in double to be exact.
constexpr int kPartBits = 53 - kBlockBits;
// Sums of double in one chain wait for each other; so many chains do not.
constexpr int kChains = 4;

typedef float HalfFloats __attribute__((vector_size(MC_REGISTER_BYTES / 2)));
typedef int64_t Longs __attribute__((vector_size(MC_REGISTER_BYTES)));

// The next registers' worth of float or double, as doubles.
inline DoubleVec doubles(const double* p) { return simd::load_as<DoubleVec>(p); }
inline DoubleVec doubles(const float* p) {
  const auto floats = simd::load_as<HalfFloats>(p);
  // gcc converts halves of a register, and puts them together
#if defined(__AVX512F__)
  return (DoubleVec)_mm512_cvtps_pd((__m256)floats);
#elif defined(__AVX2__)
  return (DoubleVec)_mm256_cvtps_pd((__m128)floats);
#else
  return __builtin_convertvector(floats, DoubleVec);
#endif
}

inline double total(DoubleVec v) {
  double sum = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) sum += v[lane];
  return sum;
}

// A row in the type that its sums are computed in: half precision is widened block by block.
template <typename T>
class Widened {
 public:
  using Value = simd::Acc<T>;
  explicit Widened(const T* x) : x_(x) {}

  // `count` <= kBlock values from `first` on, and zeros to the end of the last register.
  const Value* block(int64_t first, int64_t count) {
    if constexpr (std::is_same_v<T, Value>) {
      if (count == kBlock) return x_ + first;
    }
    simd::for_each_pair<T>(count, [&](int64_t i, auto elements) {
      simd::store_in_order(kept_ + i, wide(x_ + first + i, elements));
    });
    return kept_;
  }

 private:
  template <typename Elements>
  static auto wide(const T* p, Elements elements) {
    return simd::load_in_order(p, elements);
  }

  const T* x_;
  alignas(MC_REGISTER_BYTES) Value kept_[kBlock + simd::kStep<T>];
};

// Between which powers of two the bits of some values are: |v| < 2^above, and v is a multiple of
// 2^below. Of zeros, there are none.
struct Range {
  int above, below;
  bool is_finite;
};

// Calls visit(i, half) on the way for each register's worth of floats, in turns for the first and
// the second of two; to the end of the second there must be zeros.
template <typename Visit>
inline Range range_of(const float* x, int64_t count, const Visit& visit) {
  using simd::Bits;
  constexpr int64_t kFloats = simd::kLanes<float>;
  Bits most[2] = {}, least[2] = {~Bits{}, ~Bits{}};
  for (int64_t i = 0; i < count; i += 2 * kFloats) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const int64_t at = i + half * kFloats;
      const Bits size = simd::load_as<Bits>(x + at) & 0x7fffffff, less = size - 1;
      most[half] = most[half] > size ? most[half] : size;
      // zero becomes the largest of all
      least[half] = least[half] < less ? least[half] : less;
      visit(at, half);
    }
  }
  uint32_t high = 0, low = ~uint32_t(0);
  for (int64_t lane = 0; lane < kFloats; ++lane) {
    high = std::max({high, most[0][lane], most[1][lane]});
    low = std::min({low, least[0][lane], least[1][lane]});
  }
  if (high == 0) return {-149, -149, true};
  const int top = high >> 23, bottom = (low + 1) >> 23;
  return {std::max(top, 1) - 126, std::max(bottom, 1) - 150, top != 255};
}

inline Range range_of(const float* x, int64_t count) {
  return range_of(x, count, [](int64_t, int) {});
}

// The range of floats, and their sum in double as they are, in one pass.
inline Range range_and_sum_of(const float* x, int64_t count, double& sum) {
  DoubleVec sums[2][2] = {};
  const Range range = range_of(x, count, [&](int64_t i, int half) {
    sums[half][0] += doubles(x + i);
    sums[half][1] += doubles(x + i + kLanes);
  });
  sum = total((sums[0][0] + sums[0][1]) + (sums[1][0] + sums[1][1]));
  return range;
}

inline Range range_of(const double* x, int64_t count) {
  Longs most = {}, least = ~Longs{} & INT64_MAX;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Longs size = simd::load_as<Longs>(x + i) & INT64_MAX;
    const Longs less = (size - 1) & INT64_MAX;
    most = most > size ? most : size;
    least = least < less ? least : less;
  }
  int64_t high = 0, low = INT64_MAX;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    high = std::max<int64_t>(high, most[lane]);
    low = std::min<int64_t>(low, least[lane]);
  }
  if (high == 0) return {-1074, -1074, true};
  const int top = static_cast<int>(high >> 52), bottom = static_cast<int>((low + 1) >> 52);
  return {std::max(top, 1) - 1022, std::max(bottom, 1) - 1075, top != 2047};
}

// Exact sums of what term(i, add) adds, for each register's worth of `count` values: K parts of
// terms below 2^above, the first ones multiples of 2^(above - 42), of 2^(above - 85), and so on.
template <int K, typename Term>
void add_parts(Exact& sum, int above, int64_t count, const Term& term) {
  DoubleVec parts[kChains][K] = {};
  double thresholds[K];
  // 1.5 2^52 times the unit: what is added to it loses all bits below the unit
  for (int k = 0; k < K; ++k) thresholds[k] = std::ldexp(1.5, above - 42 - 43 * k + 52);
  const auto add = [&](int chain, DoubleVec rest) {
#pragma GCC unroll 4
    for (int k = 0; k < K - 1; ++k) {
      const DoubleVec part = (rest + thresholds[k]) - thresholds[k];
      parts[chain][k] += part;
      rest -= part;
    }
    parts[chain][K - 1] += rest;
  };
  int64_t i = 0;
  for (; i + kChains * kLanes <= count; i += kChains * kLanes) {
#pragma GCC unroll 4
    for (int chain = 0; chain < kChains; ++chain)
      term(i + chain * kLanes, [&](DoubleVec v) { add(chain, v); });
  }
  for (; i < count; i += kLanes) term(i, [&](DoubleVec v) { add(0, v); });
  for (int k = 0; k < K; ++k) {
    DoubleVec part = parts[0][k];
    for (int chain = 1; chain < kChains; ++chain) part += parts[chain][k];
    sum.add(total(part));
  }
}

// The same for as many parts as the terms need; false where that is more than there are.
template <typename Term>
bool add_exactly(Exact& sum, int above, int below, int64_t count, const Term& term) {
  // thresholds and sums stay in range
  if (above > 1000 || above < -700) return false;
  const int width = above - below;
  if (width <= kPartBits) {
    add_parts<1>(sum, above, count, term);
  } else if (width <= 85) {
    add_parts<2>(sum, above, count, term);
  } else if (width <= 128) {
    add_parts<3>(sum, above, count, term);
  } else if (width <= 171) {
    add_parts<4>(sum, above, count, term);
  } else {
    return false;
  }
  return true;
}

}  // namespace metalcore::precise
