// SPDX-License-Identifier: MIT
// Activations as whole numbers: for each 32 values a scale, and 1, 2 or 3 bytes per value. Sums of
// 32 products with quants are then exact in 32 bits, the third byte apart.
//   bytes: planes of 32 signed bytes, most significant first (for dot products of bytes)
//   words: of values 4 j .. 4 j + 3 the pairs (0, 2) and (1, 3) as 16 bits; for 3 bytes, the upper
//          two of all values and then the lowest
#pragma once

#include <memory>

#include "tiles.h"

namespace metalcore::cpu::quant {

// What is not in bytes: value = scale * integer; integer = 256 high + low for three bytes.
struct Part {
  float scale, sum;         // sum of the values
  int32_t high[2], low[2];  // sums of 16 integers each
};

struct Activations {
  int count = 0;           // bytes per value
  bool are_words = false;  // else bytes
  int64_t parts = 0;       // of a row
  std::unique_ptr<uint8_t[]> values;
  std::unique_ptr<Part[]> info;

  Activations() = default;
  Activations(int64_t M, int64_t parts, int count, bool are_words)
      : count(count), are_words(are_words), parts(parts) {
    values.reset(new uint8_t[M * row_bytes()]);
    info.reset(new Part[M * parts]);
  }

  int64_t part_bytes() const { return are_words ? (count == 3 ? 128 : 64) : 32 * count; }
  // With a line between rows: those of a few thousand bytes would share the places of a cache.
  int64_t row_bytes() const { return parts * part_bytes() + 64; }
  uint8_t* at(int64_t m) const { return values.get() + m * row_bytes(); }
};

// Blocks whose values are all below it count as zeros: their scale would have no inverse.
constexpr float kLeastMagnitude = 1e-30f;

// The integers of 32 values, and their scale: NaN where a value is not finite.
inline float to_integers(const float* x, float most, int32_t* q) {
  constexpr int64_t L = simd::kLanes<float>;
  FloatVec top = {}, off = {};
  for (int64_t i = 0; i < 32; i += L) {
    const auto v = simd::load_as<FloatVec>(x + i);
    const FloatVec size = simd::bits_as<FloatVec>(simd::bits_as<Bits>(v) & 0x7fffffff);
    top = size > top ? size : top;
    off += v - v;
  }
  float largest = 0, wrong = 0;
  for (int64_t i = 0; i < L; ++i) {
    largest = std::max(largest, top[i]);
    wrong += off[i];
  }
  if (wrong != 0 || !(largest > kLeastMagnitude)) {
    std::fill_n(q, 32, 0);
    return wrong != 0 ? std::nanf("") : 0.0f;
  }
  const float inverse = most / largest;
  constexpr float kRound = 12582912.0f;
  for (int64_t i = 0; i < 32; i += L) {
    const FloatVec v = (simd::load_as<FloatVec>(x + i) * inverse + kRound) - kRound;
    const SignedBits whole = __builtin_convertvector(v, SignedBits);
    std::memcpy(q + i, &whole, sizeof(whole));
  }
  return largest / most;
}

inline void put_planes(const int32_t* q, int count, uint8_t* to) {
  int32_t rest[32];
  std::memcpy(rest, q, sizeof(rest));
  for (int p = count - 1; p >= 0; --p) {
    int8_t low[32];
    for (int i = 0; i < 32; ++i) low[i] = int8_t(rest[i]);
    for (int i = 0; i < 32; ++i) rest[i] = (rest[i] - low[i]) >> 8;
    std::memcpy(to + 32 * p, low, sizeof(low));
  }
}

inline void put_words(const int32_t* q, int16_t* to) {
  for (int j = 0; j < 8; ++j) {
    for (int i = 0; i < 4; ++i) to[4 * j + i % 2 * 2 + i / 2] = int16_t(q[4 * j + i]);
  }
}

// The largest integer: what 1 or 2 signed bytes hold, with a low byte down to -128; and 2^22.
constexpr float largest_integer(int count) {
  return count == 1 ? 127.0f : count == 2 ? 32512.0f : 4194304.0f;
}

inline void put_part(const float* x, const Activations& a, uint8_t* to, Part& part) {
  int32_t q[32];
  part.scale = to_integers(x, largest_integer(a.count), q);
  int32_t high[32], low[32] = {};
  std::memcpy(high, q, sizeof(q));
  if (a.count == 3) {
    for (int i = 0; i < 32; ++i) low[i] = int8_t(q[i]);
    for (int i = 0; i < 32; ++i) high[i] = (q[i] - low[i]) >> 8;
  }
  for (int h = 0; h < 2; ++h) {
    part.high[h] = part.low[h] = 0;
    for (int i = 0; i < 16; ++i) {
      part.high[h] += high[16 * h + i];
      part.low[h] += low[16 * h + i];
    }
  }
  const int64_t total =
      int64_t(part.high[0] + part.high[1]) * (a.count == 3 ? 256 : 1) + part.low[0] + part.low[1];
  part.sum = part.scale * float(total);
  if (a.are_words) {
    put_words(high, reinterpret_cast<int16_t*>(to));
    if (a.count == 3) put_words(low, reinterpret_cast<int16_t*>(to + 64));
  } else {
    put_planes(q, a.count, to);
  }
}

// Row m from K values, filled up with zeros.
template <typename T>
void put_row(const T* x, int64_t K, const Activations& a, int64_t m) {
  uint8_t* to = a.at(m);
  for (int64_t p = 0; p < a.parts; ++p, to += a.part_bytes()) {
    float values[32] = {};
    const int64_t n = std::clamp<int64_t>(K - 32 * p, 0, 32);
    for (int64_t i = 0; i < n; ++i) values[i] = float(x[32 * p + i]);
    put_part(values, a, to, a.info[m * a.parts + p]);
  }
}

}  // namespace metalcore::cpu::quant
