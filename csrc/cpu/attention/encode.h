// SPDX-License-Identifier: MIT
// Codes of 8 bits: those nearest to x / scale, where scale = largest |x| / 127 (int8) or / 448
// (float8_e4m3fn).
#pragma once

#include "eight_bit.h"

namespace metalcore::cpu::tiles {

// The code nearest to x, ties to even; x is within what codes reach, or NaN.
inline Float8 float8_of(float x) {
  const uint32_t bits = simd::bits_as<uint32_t>(x), sign = bits >> 24 & 0x80;
  const uint32_t size = bits & 0x7fffffff;
  if (size > 0x7f800000) return {uint8_t(sign | 0x7f)};
  // below 2^-6, steps are 2^-9: an addition rounds to them
  if (size < 0x3c800000) {
    const float shifted = simd::bits_as<float>(size) + 0x1p14f;
    return {uint8_t(sign | (simd::bits_as<uint32_t>(shifted) & 0xff))};
  }
  const uint32_t rounded = size + 0x7ffff + (size >> 20 & 1);
  return {uint8_t(sign | ((rounded >> 20) - (120 << 3)))};
}

// Codes of a row, and its scale, which is 1 where none is kept.
template <typename S, typename T>
float encode_row(const T* x, int64_t n, bool has_scale, S* codes) {
  constexpr float kMost = std::is_same_v<S, Int8> ? 127 : 448;
  float largest = 0;
  bool is_nan = false;
  for (int64_t i = 0; i < n; ++i) {
    const float a = std::abs(float(x[i]));
    is_nan |= a != a;
    largest = std::max(largest, a);
  }
  if (is_nan) largest = std::numeric_limits<float>::quiet_NaN();
  const float scale = has_scale ? largest / kMost : 1.0f;
  const bool is_plain = scale > 0 && std::isfinite(scale);
  for (int64_t i = 0; i < n; ++i) {
    float y = is_plain ? float(x[i]) / scale : 0.0f;
    y = y > kMost ? kMost : y < -kMost ? -kMost : y;
    if constexpr (std::is_same_v<S, Int8>) {
      codes[i] = {int8_t(std::nearbyint(y))};
    } else {
      codes[i] = float8_of(y);
    }
  }
  return scale;
}

}  // namespace metalcore::cpu::tiles
