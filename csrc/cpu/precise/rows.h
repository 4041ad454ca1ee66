// SPDX-License-Identifier: MIT
// Sums of rows at each level of precision, in an order that depends on a row's length alone.
#pragma once

#include "../common/tensor.h"
#include "terms.h"

namespace metalcore::precise {

using cpu::Tensor;

// As in ops/precise/_levels.py.
enum Level : int64_t { kCompensated, kExact, kFloat64, kLevelCount };

inline const char* name_of(int64_t level) {
  return level == kExact ? "exact" : level == kFloat64 ? "float64" : "compensated";
}

// high + low, which may be more than a double holds.
struct TwoDoubles {
  double high = 0, low = 0;

  void add(double x) {
    const double sum = high + x, of_x = sum - high;
    low += (high - (sum - of_x)) + (x - of_x);
    high = sum;
  }
  void add(const TwoDoubles& other) {
    add(other.high);
    low += other.low;
  }
  // In infinity's parts there is a NaN.
  double value() const { return std::isfinite(low) ? high + low : high; }

  double quotient(int64_t divisor) const {
    const double n = static_cast<double>(divisor), q = value() / n;
    const double rest = std::fma(-q, n, high) + low;
    return std::isfinite(rest) ? q + rest / n : q;
  }
  double root() const {
    const double r = std::sqrt(value()), rest = std::fma(-r, r, high) + low;
    return r > 0 && std::isfinite(rest) ? r + rest / (2 * r) : r;
  }
};

// Lanes that add up doubles, and with kTwofold what each addition loses.
template <bool kTwofold>
class Lanes {
 public:
  void add(int chain, DoubleVec v) {
    if constexpr (kTwofold) {
      const DoubleVec sum = high_[chain] + v, of_v = sum - high_[chain];
      low_[chain] += (high_[chain] - (sum - of_v)) + (v - of_v);
      high_[chain] = sum;
    } else {
      high_[chain] += v;
    }
  }
  TwoDoubles total() const {
    TwoDoubles sum;
    for (int chain = 0; chain < kChains; ++chain) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        sum.add(high_[chain][lane]);
        sum.low += low_[chain][lane];
      }
    }
    return sum;
  }

 private:
  DoubleVec high_[kChains] = {}, low_[kChains] = {};
};

// Calls term(i, chain) for each register's worth of `count` values.
template <typename Term>
inline void for_each_register(int64_t count, const Term& term) {
  int64_t i = 0;
  for (; i + kChains * kLanes <= count; i += kChains * kLanes) {
#pragma GCC unroll 4
    for (int chain = 0; chain < kChains; ++chain) term(i + chain * kLanes, chain);
  }
  for (; i < count; i += kLanes) term(i, 0);
}

// A multiple of kBlock: what one thread adds up before parts are put together, in their order.
constexpr int64_t kPart = int64_t(1) << 17;

// The sum over `count` values of what add(sum, first, count) adds for one part of them.
template <typename Sum, typename Add>
Sum sum_of_parts(int64_t count, bool in_parallel, const Add& add) {
  const int64_t parts = std::max<int64_t>(1, (count + kPart - 1) / kPart);
  std::vector<Sum> sums(parts);
  const auto some = [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p)
      add(sums[p], p * kPart, std::min(kPart, count - p * kPart));
  };
  if (in_parallel && parts > 1) {
    cpu::parallel_for(0, parts, 1, some);
  } else {
    some(0, parts);
  }
  for (int64_t p = 1; p < parts; ++p) sums[0].add(sums[p]);
  return sums[0];
}

// Calls row(r, in_parallel) for each row: rows are shared out among threads, or long ones are one
// after the other.
template <typename Row>
void for_each_row(int64_t rows, int64_t n, const Row& row) {
  if (rows < 8 && n > kPart) {
    for (int64_t r = 0; r < rows; ++r) row(r, true);
  } else {
    cpu::parallel_for(0, rows, cpu::grain_rows(n), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) row(r, false);
    });
  }
}

// An unwritten tensor for a value of each row of x.
inline Tensor empty_for_rows(const Tensor& x) {
  return cpu::empty(x.sizes().data(), x.dim() - 1, x.scalar_type());
}

template <typename T>
T from_double(double value) {
  return static_cast<T>(static_cast<simd::Acc<T>>(value));
}

}  // namespace metalcore::precise
