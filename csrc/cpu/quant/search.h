// SPDX-License-Identifier: MIT
// How ggml looks for the scales of q4_K, q5_K, q6_K and iq4_nl. Groups stand side by side, one per
// lane, so that each adds up its values in their order. What includes this is compiled without
// contraction of products and sums.
#pragma once

#include "formats.h"

namespace metalcore::cpu::quant {

using simd::FloatVec;
constexpr int64_t kLanesOfGroups = simd::kLanes<float>;
constexpr float kTiny = 1e-15f;

inline FloatVec all(float v) { return FloatVec{} + v; }

// Nearest whole number, ties to even, for magnitudes up to 2^22.
template <typename V>
inline V nearest(V v) {
  return (v + 12582912.0f) - 12582912.0f;
}

inline FloatVec least_of(FloatVec a, FloatVec b) { return a < b ? a : b; }
inline FloatVec most_of(FloatVec a, FloatVec b) { return a > b ? a : b; }
inline FloatVec within(FloatVec v, float low, float high) {
  return most_of(least_of(v, all(high)), all(low));
}

inline FloatVec magnitude(FloatVec v) {
  return simd::bits_as<FloatVec>(simd::bits_as<simd::Bits>(v) & 0x7fffffff);
}

// The value of largest magnitude, the first one of several; 0 for zeros.
template <int n>
inline FloatVec peak(const FloatVec* x) {
  FloatVec most = {}, found = {};
  for (int i = 0; i < n; ++i) {
    const FloatVec a = magnitude(x[i]);
    found = a > most ? x[i] : found;
    most = most_of(a, most);
  }
  return found;
}

// x about scale * q + least with q from 0 to kMost: writes q, gives scale and -least.
template <int kMost>
inline void fit_scale_and_min(const FloatVec* x, FloatVec* q, FloatVec* scale_out,
                              FloatVec* least_out) {
  FloatVec squares = {};
  for (int i = 0; i < 32; ++i) squares = squares + x[i] * x[i];
  const FloatVec root = simd::square_root(squares / 32.0f);
  FloatVec weight[32], sum_w = {}, sum_x = {}, low = x[0], high = x[0];
  for (int i = 0; i < 32; ++i) {
    weight[i] = root + magnitude(x[i]);
    sum_w = sum_w + weight[i];
    sum_x = sum_x + weight[i] * x[i];
    low = least_of(x[i], low);
    high = most_of(x[i], high);
  }
  low = least_of(low, all(0));
  const auto is_flat = high == low;
  const FloatVec first = float(kMost) / (high - low);
  FloatVec scale = 1.0f / first, least = low, best = {};
  for (int i = 0; i < 32; ++i) {
    q[i] = within(nearest(first * (x[i] - low)), 0, kMost);
    const FloatVec off = scale * q[i] + low - x[i];
    best = best + weight[i] * (off * off);
  }
  constexpr int kSteps = kMost == 15 ? 20 : 15;
  for (int step = 0; step <= kSteps; ++step) {
    const float start = (kMost == 15 ? -1.0f : -0.5f) + 0.1f * float(step) + float(kMost);
    const FloatVec factor = start / (high - least);
    FloatVec tried[32], sum_l = {}, sum_l2 = {}, sum_xl = {};
    for (int i = 0; i < 32; ++i) {
      tried[i] = within(nearest(factor * (x[i] - least)), 0, kMost);
      const FloatVec wl = weight[i] * tried[i];
      sum_l = sum_l + wl;
      sum_l2 = sum_l2 + wl * tried[i];
      sum_xl = sum_xl + wl * x[i];
    }
    const FloatVec D = sum_w * sum_l2 - sum_l * sum_l;
    FloatVec new_scale = (sum_w * sum_xl - sum_x * sum_l) / D;
    FloatVec new_least = (sum_l2 * sum_x - sum_l * sum_xl) / D;
    new_scale = new_least > 0 ? sum_xl / sum_l2 : new_scale;
    new_least = new_least > 0 ? all(0) : new_least;
    FloatVec error = {};
    for (int i = 0; i < 32; ++i) {
      const FloatVec off = new_scale * tried[i] + new_least - x[i];
      error = error + weight[i] * (off * off);
    }
    const auto is_better = (D > 0) & (error < best);
    for (int i = 0; i < 32; ++i) q[i] = is_better ? tried[i] : q[i];
    best = is_better ? error : best;
    scale = is_better ? new_scale : scale;
    least = is_better ? new_least : least;
  }
  for (int i = 0; i < 32; ++i) q[i] = is_flat ? all(0) : q[i];
  *scale_out = is_flat ? all(0) : scale;
  *least_out = -(is_flat ? low : least);
}

// x about scale * (q - 32) for 16 values: writes q from 0 to 63, gives scale.
inline FloatVec fit_scale(const FloatVec* x, FloatVec* q) {
  const FloatVec top = peak<16>(x);
  const auto is_zero = magnitude(top) < kTiny;
  FloatVec scale = {}, best = {};
  constexpr int kFirst = -10;
  for (int step = kFirst; step <= 9; ++step) {
    if (step == 0) continue;
    const float steps = step == kFirst ? 32.0f : 32.0f + 0.1f * float(step);
    const FloatVec factor = -steps / top;
    FloatVec tried[16], lx = {}, ll = {};
    for (int i = 0; i < 16; ++i) {
      tried[i] = within(nearest(factor * x[i]), -32, 31);
      const FloatVec weight = x[i] * x[i];
      lx = lx + weight * x[i] * tried[i];
      ll = ll + weight * tried[i] * tried[i];
    }
    auto is_better = (ll > 0) & (lx * lx > best * ll);
    if (step == kFirst) is_better = ll == ll;
    const FloatVec found = ll != 0 ? lx / ll : all(0);
    for (int i = 0; i < 16; ++i) q[i] = is_better ? tried[i] + 32.0f : q[i];
    scale = is_better ? found : scale;
    best = is_better ? scale * lx : best;
  }
  for (int i = 0; i < 16; ++i) q[i] = is_zero ? all(0) : q[i];
  return is_zero ? all(0) : scale;
}

// The place in kNonLinear of what is nearest, the higher one on a tie, and what stands there.
inline void nearest_in_table(FloatVec x, FloatVec* place, FloatVec* value) {
  FloatVec at = {}, found = all(kNonLinear[0]);
  for (int i = 1; i < 16; ++i) {
    const float low = kNonLinear[i - 1], high = kNonLinear[i];
    const auto is_low = x - low < high - x;
    at = is_low ? at : all(float(i));
    found = is_low ? found : all(high);
  }
  *place = at;
  *value = found;
}

// x about scale * kNonLinear[q] for 32 values: writes q, gives scale.
inline FloatVec fit_table(const FloatVec* x, FloatVec* q) {
  const FloatVec top = peak<32>(x);
  const auto is_zero = magnitude(top) < kTiny;
  const float edge = kNonLinear[0];
  FloatVec d = {}, best = {}, place, value;
  constexpr int kFirst = -8;
  for (int step = kFirst; step <= 7; ++step) {
    const FloatVec factor = step == kFirst ? 1.0f / (-top / edge) : (float(step) + edge) / top;
    FloatVec qx = {}, qq = {};
    for (int i = 0; i < 32; ++i) {
      nearest_in_table(factor * x[i], &place, &value);
      const FloatVec weight = x[i] * x[i];
      qx = qx + weight * value * x[i];
      qq = qq + weight * value * value;
    }
    auto is_better = (qq > 0) & (qx * qx > best * qq);
    if (step == kFirst) is_better = qq > 0;
    d = is_better ? qx / qq : d;
    best = is_better ? d * qx : best;
  }
  d = is_zero ? all(0) : d;
  const FloatVec inverse = d != 0 ? 1.0f / d : all(0);
  for (int i = 0; i < 32; ++i) nearest_in_table(inverse * x[i], &q[i], &value);
  return d;
}

}  // namespace metalcore::cpu::quant
