// SPDX-License-Identifier: MIT
// Products of small bfloat16 matrices by instructions that add two products at a time.
//
// Both sides are in pairs along the sum: a word holds two neighbours. Where the words of A lie is
// told by two strides, as in product.h; rows of B are registers of words. Sums are float32.
// The instruction is newer than the instruction set that is compiled for: ask has_dots().
#pragma once

#include <array>

#include "features.h"
#include "product.h"

#if defined(__AVX512F__)
#define MC_DOTS __attribute__((target("avx512bf16")))

namespace metalcore::product {

inline bool has_dots() {
  static const bool has = cpu::has_bfloat16_dots();
  return has;
}

// Where word k of row m of A stands, in elements of two bytes.
struct Words {
  const uint16_t* values;
  int64_t row, column;
};

namespace detail {

template <int Rows>
MC_DOTS inline void dot_tile(Words a, Lines<const uint32_t> b, Lines<float> c, int64_t depth,
                             bool adds) {
  __m512 sum[Rows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      sum[r][j] = adds ? _mm512_loadu_ps(c.values + r * c.row + j * 16) : _mm512_setzero_ps();
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    __m512i line[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      line[j] = _mm512_loadu_si512(b.values + k * b.row + j * 16);
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      int32_t word;
      std::memcpy(&word, a.values + r * a.row + k * a.column, sizeof(word));
      const __m512i pair = _mm512_set1_epi32(word);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        sum[r][j] = _mm512_dpbf16_ps(sum[r][j], (__m512bh)pair, (__m512bh)line[j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      _mm512_storeu_ps(c.values + r * c.row + j * 16, sum[r][j]);
    }
  }
}

}  // namespace detail

// n columns of C (+)= A B, a multiple of kWidth. `depth` counts words.
MC_DOTS inline void multiply_pairs(int64_t rows, int64_t n, Words a, Lines<const uint32_t> b,
                                   Lines<float> c, int64_t depth, bool adds) {
  const auto from = [&](int64_t i) { return Words{a.values + i * a.row, a.row, a.column}; };
  for (int64_t j = 0; j < n; j += kWidth<float>) {
    const auto to = c.from_column(j);
    const auto with = b.from_column(j);
    int64_t m = 0;
    for (; m + 8 <= rows; m += 8) {
      detail::dot_tile<8>(from(m), with, to.from_row(m), depth, adds);
    }
    for (; m + 4 <= rows; m += 4) {
      detail::dot_tile<4>(from(m), with, to.from_row(m), depth, adds);
    }
    for (; m < rows; ++m) detail::dot_tile<1>(from(m), with, to.from_row(m), depth, adds);
  }
}

// n values, a multiple of 32, rounded to bfloat16.
MC_DOTS inline void round_values(const float* x, int64_t n, uint16_t* y) {
  for (int64_t i = 0; i < n; i += 32) {
    const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + i + 16), _mm512_loadu_ps(x + i));
    std::memcpy(y + i, &both, sizeof(both));
  }
}

// y[r / 2][i] = (x[r][i], x[r + 1][i]) in bfloat16, rows of n values, a multiple of 16. The same
// memory will do for both.
MC_DOTS inline void pair_values(const float* x, int64_t rows, int64_t n, uint32_t* y) {
  // value i of the first sixteen, then of the second
  alignas(64) static constexpr auto kInterleave = [] {
    std::array<uint16_t, 32> order = {};
    for (int i = 0; i < 32; ++i) order[i] = uint16_t(i / 2 + i % 2 * 16);
    return order;
  }();
  const __m512i order = _mm512_load_si512(kInterleave.data());
  for (int64_t r = 0; r < rows; r += 2) {
    for (int64_t i = 0; i < n; i += 16) {
      const __m512 low = _mm512_loadu_ps(x + r * n + i);
      const __m512 high = r + 1 < rows ? _mm512_loadu_ps(x + (r + 1) * n + i) : _mm512_setzero_ps();
      const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
      _mm512_storeu_si512(y + r / 2 * n + i, _mm512_permutexvar_epi16(order, (__m512i)both));
    }
  }
}

// y[r / 2][i] = (x[r][i], x[r + 1][i]), words `width` apart. What is not finite becomes zero;
// `special` gets the rows that have such values.
inline void pair_rows(const simd::BFloat16* x, int64_t stride, int64_t count, int64_t n,
                      uint32_t* y, int64_t width, std::vector<int64_t>& special) {
  const auto bits = reinterpret_cast<const uint16_t*>(x);
  constexpr uint32_t kExponent = 0x7f80;
  special.clear();
  for (int64_t r = 0; r < count; r += 2) {
    const uint16_t *low = bits + r * stride, *high = low + stride;
    const bool has_high = r + 1 < count;
    uint32_t* const to = y + r / 2 * width;
    uint32_t low_is_special = 0, high_is_special = 0;
    for (int64_t i = 0; i < n; ++i) {
      uint32_t a = low[i], b = has_high ? high[i] : 0;
      const uint32_t a_special = (a & kExponent) == kExponent,
                     b_special = (b & kExponent) == kExponent;
      low_is_special |= a_special;
      high_is_special |= b_special;
      a = a_special ? 0 : a;
      b = b_special ? 0 : b;
      to[i] = a | b << 16;
    }
    if (low_is_special) special.push_back(r);
    if (high_is_special) special.push_back(r + 1);
  }
}

}  // namespace metalcore::product
#endif
