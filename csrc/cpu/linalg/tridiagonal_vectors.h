// SPDX-License-Identifier: MIT
// Eigenvectors of one symmetric tridiagonal matrix: T - x is factored from both ends, and the
// vector is found from where they meet best. Each lane has an eigenvalue of its own.
#pragma once

#include <atomic>
#include <cmath>
#include <vector>

#include "../common/lanes.h"

namespace metalcore::cpu {

// Vectors of length 1 as columns of z [n][ld], those of values[i] in column i. False where one has
// no length that is a number.
template <typename T>
bool tridiagonal_vectors(const std::vector<double>& diagonal, const std::vector<double>& beside,
                         const std::vector<double>& values, int64_t ld, T* z) {
  using V = simd::Vec<double>;
  using Index = lanes::Mask<double>;
  using lanes::splat;
  constexpr int64_t kBeside = 4, K = kBeside * simd::kLanes<double>;
  constexpr double kLeast = 1e-290;
  const int64_t n = diagonal.size();
  std::atomic<bool> all_found = true;
  const auto pivot = [](V v) { return lanes::abs(v) < kLeast ? splat(-kLeast) : v; };
  parallel_for(0, (n + K - 1) / K, 1, [&](int64_t begin, int64_t end) {
    // what is eliminated from above and from below, then the vector; and the pivots from above
    V* down = reinterpret_cast<V*>(lanes::workspace<double>(3 * n * K));
    V *up = down + n * kBeside, *pivots = up + n * kBeside;
    for (int64_t first = begin * K; first < end * K; first += K) {
      V x[kBeside], p[kBeside], least[kBeside], norm[kBeside] = {};
      Index meets[kBeside] = {};
      for (int64_t k = 0; k < K; ++k) {
        x[k / simd::kLanes<double>][k % simd::kLanes<double>] = values[std::min(first + k, n - 1)];
      }
      for (int64_t s = 0; s < kBeside; ++s) p[s] = pivot(diagonal[0] - x[s]);
      for (int64_t i = 0; i + 1 < n; ++i) {
        for (int64_t s = 0; s < kBeside; ++s) {
          pivots[i * kBeside + s] = p[s];
          const V factor = beside[i] / p[s];
          down[i * kBeside + s] = factor;
          p[s] = pivot((diagonal[i + 1] - x[s]) - beside[i] * factor);
        }
      }
      for (int64_t s = 0; s < kBeside; ++s) {
        pivots[(n - 1) * kBeside + s] = p[s];
        down[(n - 1) * kBeside + s] = up[s] = V{};
        least[s] = lanes::abs(p[s]);
        meets[s] = Index{} + (n - 1);
        p[s] = pivot(diagonal[n - 1] - x[s]);
      }
      for (int64_t i = n - 2; i >= 0; --i) {
        for (int64_t s = 0; s < kBeside; ++s) {
          const V factor = beside[i] / p[s];
          up[(i + 1) * kBeside + s] = factor;
          // what both eliminations leave of this row
          const V left = lanes::abs(pivots[i * kBeside + s] - beside[i] * factor);
          p[s] = pivot((diagonal[i] - x[s]) - beside[i] * factor);
          const Index better = left < least[s];
          least[s] = better ? left : least[s];
          meets[s] = better ? Index{} + i : meets[s];
        }
      }
      // the vector is 1 where they meet; each step away from there follows from the one before
      V* out = pivots;
      V v[kBeside] = {};
      for (int64_t i = n - 1; i >= 0; --i) {
        const Index at_i = Index{} + i;
        for (int64_t s = 0; s < kBeside; ++s) {
          v[s] = at_i == meets[s] ? splat(1.0) : -down[i * kBeside + s] * v[s];
          out[i * kBeside + s] = v[s];
          norm[s] += v[s] * v[s];
        }
      }
      std::fill_n(v, kBeside, V{});
      for (int64_t i = 0; i < n; ++i) {
        const Index at_i = Index{} + i;
        for (int64_t s = 0; s < kBeside; ++s) {
          const V below = -up[i * kBeside + s] * v[s];
          out[i * kBeside + s] += below;
          norm[s] += below * below;
          v[s] = at_i < meets[s] ? V{} : out[i * kBeside + s];
        }
      }
      for (int64_t s = 0; s < kBeside; ++s) {
        norm[s] = 1 / lanes::sqrt(norm[s]);
        if (lanes::any(~(norm[s] > 0))) all_found = false;
      }
      const int64_t count = std::min(K, n - first);
      for (int64_t i = 0; i < n; ++i) {
        double row[K];
        for (int64_t s = 0; s < kBeside; ++s) {
          const V v = out[i * kBeside + s] * norm[s];
          std::memcpy(row + s * simd::kLanes<double>, &v, sizeof(v));
        }
        for (int64_t k = 0; k < count; ++k) z[i * ld + first + k] = T(row[k]);
      }
    }
  });
  return all_found;
}

}  // namespace metalcore::cpu
