// SPDX-License-Identifier: MIT
// Eigenvalues of one symmetric tridiagonal matrix by counting: T - x has as many negative pivots as
// T has eigenvalues below x. Each lane halves the interval of an eigenvalue of its own.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "../common/lanes.h"

namespace metalcore::cpu {

template <typename T>
class EigenvalueCounter {
 public:
  // Registers that are counted for together: they hide the latency of each other's divisions.
  static constexpr int kBeside = 4;
  static constexpr int64_t kTogether = kBeside * simd::kLanes<T>;

  // The squares of all elements must be numbers.
  EigenvalueCounter(const std::vector<T>& diagonal, const std::vector<T>& beside)
      : diagonal(diagonal), squares(diagonal.size()) {
    const int64_t n = diagonal.size();
    for (int64_t i = 0; i < n; ++i) {
      const T before = i ? std::abs(beside[i - 1]) : T(0);
      const T radius = before + (i + 1 < n ? std::abs(beside[i]) : T(0));
      squares[i] = before * before;
      low = std::min(low, diagonal[i] - radius);
      high = std::max(high, diagonal[i] + radius);
    }
    precision = std::numeric_limits<T>::epsilon() * std::max(-low, high);
    low -= 4 * precision;
    high += 4 * precision;
  }

  // How many eigenvalues are below each of kTogether values.
  void count(const T* x, T* below) const {
    // in place of a pivot of zero: its inverse times a square is a number
    constexpr T kLeast = std::is_same_v<T, double> ? T(1e-290) : T(1e-30);
    using lanes::splat;
    using simd::Vec;
    Vec<T> at[kBeside], pivot[kBeside], negative[kBeside] = {};
    for (int s = 0; s < kBeside; ++s) {
      at[s] = simd::load_as<Vec<T>>(x + s * simd::kLanes<T>);
      pivot[s] = splat<T>(1);
    }
    for (size_t i = 0; i < diagonal.size(); ++i) {
      for (int s = 0; s < kBeside; ++s) {
        const Vec<T> value = (diagonal[i] - at[s]) - squares[i] / pivot[s];
        pivot[s] = lanes::abs(value) < kLeast ? splat<T>(-kLeast) : value;
        negative[s] += pivot[s] < 0 ? splat<T>(1) : Vec<T>{};
      }
    }
    std::memcpy(below, negative, sizeof(negative));
  }

  // All eigenvalues are within these, and known to this.
  T low = 0, high = 0, precision;

 private:
  const std::vector<T>& diagonal;
  std::vector<T> squares;
};

// All eigenvalues, ascending.
template <typename T>
void tridiagonal_values(const std::vector<T>& diagonal, const std::vector<T>& beside, T* values) {
  constexpr int64_t K = EigenvalueCounter<T>::kTogether;
  const EigenvalueCounter<T> counter(diagonal, beside);
  const int64_t n = diagonal.size(), groups = (n + K - 1) / K, points = groups * K;

  // counts at as many points as there are eigenvalues give each an interval to begin with
  const T step = (counter.high - counter.low) / T(points);
  const auto point = [&](int64_t i) { return counter.low + step * T(i); };
  std::vector<T> below(points + 1, T(n));
  parallel_for(0, groups, 1, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * K; first < end * K; first += K) {
      T x[K];
      for (int64_t k = 0; k < K; ++k) x[k] = point(first + k);
      counter.count(x, below.data() + first);
    }
  });

  const int64_t halvings =
      step > counter.precision ? std::ceil(std::log2(step / counter.precision)) : 0;
  parallel_for(0, groups, 1, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * K; first < end * K; first += K) {
      T low[K], high[K], x[K], found[K];
      for (int64_t k = 0; k < K; ++k) {
        const T index = T(std::min(first + k, n - 1));
        const int64_t after = std::upper_bound(below.begin(), below.end(), index) - below.begin();
        low[k] = point(after - 1);
        high[k] = point(after);
      }
      for (int64_t h = 0; h <= halvings; ++h) {
        for (int64_t k = 0; k < K; ++k) x[k] = (low[k] + high[k]) / 2;
        if (h == halvings) break;
        counter.count(x, found);
        for (int64_t k = 0; k < K; ++k) {
          const bool is_above = found[k] > T(first + k);
          high[k] = is_above ? x[k] : high[k];
          low[k] = is_above ? low[k] : x[k];
        }
      }
      std::copy_n(x, std::min(K, n - first), values + first);
    }
  });
}

}  // namespace metalcore::cpu
