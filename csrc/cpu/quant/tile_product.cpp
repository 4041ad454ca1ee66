// SPDX-License-Identifier: MIT
// A tile of 16 rows times a few rows of activations: one row of weights per lane, so that nothing
// is added up across lanes. A word of 4 activations meets a word of 4 quants of each row.
//   bytes: dot products of four bytes, unsigned times signed. Where they are newer than the
//          instruction set that is compiled for, the CPU is asked; AVX2 has them of two bytes, with
//          sums of 16 bits
//   words: products of 16 bits, two added up; every instruction set has them

#include "tile_product.h"

#include "../common/features.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(__AVX512F__)
#define MC_BYTE_DOTS __attribute__((target("avx512vnni")))
#define MC_MOST_BYTES 3
#elif defined(__AVX2__)
#define MC_BYTE_DOTS
#define MC_MOST_BYTES 1  // two bytes would be two products where a word is one
#elif defined(__ARM_FEATURE_DOTPROD)
#define MC_BYTE_DOTS
#define MC_MOST_BYTES 3
#endif

namespace metalcore::cpu::quant {

bool takes_bytes([[maybe_unused]] int count) {
#if defined(__AVX512F__)
  static const bool has = has_byte_dots();
  return has;
#elif defined(MC_BYTE_DOTS)
  return count <= MC_MOST_BYTES;
#else
  return false;
#endif
}

typedef uint8_t Bytes __attribute__((vector_size(MC_REGISTER_BYTES)));

inline Bits everywhere(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, sizeof(word));
  return Bits{} + word;
}

inline SignedBits multiply_words(Bits a, Bits b) {
#if defined(__AVX512F__)
  return (SignedBits)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (SignedBits)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__aarch64__)
  const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
  const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y));
  return (SignedBits)vpaddq_s32(low, vmull_high_s16(x, y));
#else
  return (SignedBits)_mm_madd_epi16((__m128i)a, (__m128i)b);
#endif
}

// The sum of 32 products as a float, from those of the upper bytes and of the lowest.
inline FloatVec joined(SignedBits high, SignedBits low, bool has_low) {
  const FloatVec found = to_float(high);
  return has_low ? found * 256.0f + to_float(low) : found;
}

template <typename Format>
inline __attribute__((always_inline)) void add_part(const PartScales& s, const Part& part,
                                                    const FloatVec* dots, FloatVec& sum) {
#pragma GCC unroll 2
  for (int h = 0; h < Format::kScales; ++h) sum += dots[h] * (s.scale[h] * part.scale);
  if constexpr (Format::kHasLeast) sum += s.least * part.sum;
}

// What the middle of the quants takes off half h of the values, or off both: as an integer, so that
// weights of 0 give 0.
template <typename Format>
inline SignedBits middle_of(const int32_t* sums, int h) {
  return SignedBits{} - Format::kMiddle * (Format::kScales == 2 ? sums[h] : sums[0] + sums[1]);
}

#if defined(MC_BYTE_DOTS)
// Whether quants are taken as signed: as what they are beyond the middle.
template <typename Format>
#if defined(__AVX512F__)
constexpr bool kIsSigned = false;
#elif defined(__AVX2__)
constexpr bool kIsSigned = Format::kLargest > 63;
#else
constexpr bool kIsSigned = true;
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
// How many sums of two products fit into 16 bits, for quants up to `largest`.
constexpr int pairs_in_word(int largest) {
  int count = 8;
  while (count * 2 * 128 * largest > 32767) count /= 2;
  return count;
}

template <typename Format, int words>
inline __attribute__((always_inline)) SignedBits dot_bytes(SignedBits sum, const Bits* w,
                                                           const uint8_t* x) {
  constexpr int kTerms = kIsSigned<Format> ? 1 : std::min(words, pairs_in_word(Format::kLargest));
#pragma GCC unroll 8
  for (int j = 0; j < words; j += kTerms) {
    __m256i pairs = {};
#pragma GCC unroll 8
    for (int i = j; i < j + kTerms; ++i) {
      const __m256i q = (__m256i)w[i], a = (__m256i)everywhere(x + 4 * i);
      if constexpr (kIsSigned<Format>) {
        // |q| (a sign(q)), and no a of one byte is -128
        pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(a, q));
      } else {
        pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(q, a));
      }
    }
    sum += (SignedBits)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
  return sum;
}
#else
template <typename Format, int words>
MC_BYTE_DOTS inline
    __attribute__((always_inline)) SignedBits dot_bytes(SignedBits sum, const Bits* w,
                                                        const uint8_t* x) {
#pragma GCC unroll 8
  for (int j = 0; j < words; ++j) {
    const Bits a = everywhere(x + 4 * j);
#if defined(__AVX512F__)
    sum = (SignedBits)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w[j], (__m512i)a);
#else
    sum = (SignedBits)vdotq_s32((int32x4_t)sum, (int8x16_t)w[j], (int8x16_t)a);
#endif
  }
  return sum;
}
#endif

template <typename Format, int Rows, int count>
MC_BYTE_DOTS void multiply_by_bytes(const Work<Format>& work) {
  const Format& f = work.format;
  const Activations& a = work.activations;
  FloatVec sums[Rows][kVectors] = {};
  const uint8_t* at = work.tile;
  const uint8_t* values = a.at(work.first);
  const Part* info = a.info.get() + work.first * a.parts;
  const int64_t row = a.row_bytes();
  for (int64_t b = 0; b < work.blocks; ++b) {
    const uint8_t* const header = at;
    at += kRows * f.header();
    for (int p = 0; p < f.parts(); ++p, values += 32 * count, ++info) {
      const uint8_t* const scales = at;
      at += kRows * f.part_header();
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        PartScales s;
        f.scales(header, scales, v, s);
        Bits w[8];
        Format::quants(at, v, w);
        if constexpr (kIsSigned<Format>) {
          for (auto& word : w) word = (Bits)((Bytes)word - uint8_t(Format::kMiddle));
        }
#pragma GCC unroll 16
        for (int m = 0; m < Rows; ++m) {
          const uint8_t* x = values + m * row;
          const Part& part = info[m * a.parts];
          FloatVec dots[Format::kScales];
#pragma GCC unroll 2
          for (int h = 0; h < Format::kScales; ++h) {
            constexpr int kWords = 8 / Format::kScales;
            const Bits* const quants = w + h * kWords;
            const uint8_t* const from = x + 4 * h * kWords;
            SignedBits high = {}, low = {};
            if constexpr (!kIsSigned<Format>) {
              high = middle_of<Format>(part.high, h);
              if (count == 3) low = middle_of<Format>(part.low, h);
            }
            if (count > 1) high += dot_bytes<Format, kWords>(SignedBits{}, quants, from) << 8;
            high = dot_bytes<Format, kWords>(high, quants, count > 1 ? from + 32 : from);
            if (count == 3) low = dot_bytes<Format, kWords>(low, quants, from + 64);
            dots[h] = joined(high, low, count == 3);
          }
          add_part<Format>(s, part, dots, sums[m][v]);
        }
      }
      at += kRows * quant_bytes(Format::kBits);
    }
  }
  std::memcpy(work.y, sums, sizeof(sums));
}
#endif

template <typename Format, int Rows>
void multiply_by_words(const Work<Format>& work) {
  const Format& f = work.format;
  const Activations& a = work.activations;
  const bool has_low = a.count == 3;
  const int64_t step = has_low ? 128 : 64, row = a.row_bytes();
  FloatVec sums[Rows][kVectors] = {};
  const uint8_t* at = work.tile;
  const uint8_t* values = a.at(work.first);
  const Part* info = a.info.get() + work.first * a.parts;
  for (int64_t b = 0; b < work.blocks; ++b) {
    const uint8_t* const header = at;
    at += kRows * f.header();
    for (int p = 0; p < f.parts(); ++p, values += step, ++info) {
      const uint8_t* const scales = at;
      at += kRows * f.part_header();
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        PartScales s;
        f.scales(header, scales, v, s);
        Bits w[8];
        Format::quants(at, v, w);
#pragma GCC unroll 4
        for (int m = 0; m < Rows; ++m) {
          const uint8_t* x = values + m * row;
          const Part& part = info[m * a.parts];
          FloatVec dots[Format::kScales];
#pragma GCC unroll 2
          for (int h = 0; h < Format::kScales; ++h) {
            constexpr int kWords = 8 / Format::kScales;
            SignedBits high = middle_of<Format>(part.high, h);
            SignedBits low = middle_of<Format>(part.low, h);
#pragma GCC unroll 8
            for (int j = h * kWords; j < (h + 1) * kWords; ++j) {
              const Bits even = w[j] & 0x00ff00ff, odd = w[j] >> 8 & 0x00ff00ff;
              high += multiply_words(even, everywhere(x + 8 * j));
              high += multiply_words(odd, everywhere(x + 8 * j + 4));
              if (has_low) {
                low += multiply_words(even, everywhere(x + 64 + 8 * j));
                low += multiply_words(odd, everywhere(x + 64 + 8 * j + 4));
              }
            }
            dots[h] = joined(high, low, has_low);
          }
          add_part<Format>(s, part, dots, sums[m][v]);
        }
      }
      at += kRows * quant_bytes(Format::kBits);
    }
  }
  std::memcpy(work.y, sums, sizeof(sums));
}

// By the widest kernels that fit.
template <typename Format>
void multiply_tile(Work<Format> work, int64_t rows) {
  const auto run = [&](auto size) {
    constexpr int n = decltype(size)::value;
    for (; rows >= n; rows -= n) {
#if defined(MC_BYTE_DOTS)
      const int count = work.activations.count;
      if (work.activations.are_words) {
        multiply_by_words<Format, n>(work);
      } else if (count == 1) {
        multiply_by_bytes<Format, n, 1>(work);
#if MC_MOST_BYTES > 1
      } else if (count == 2) {
        multiply_by_bytes<Format, n, 2>(work);
      } else if (count == 3) {
        multiply_by_bytes<Format, n, 3>(work);
#endif
      }
#else
      multiply_by_words<Format, n>(work);
#endif
      work.first += n;
      work.y += n * kRows;
    }
  };
#if defined(__AVX512F__)
  run(std::integral_constant<int, 16>());
  run(std::integral_constant<int, 8>());
#endif
  run(std::integral_constant<int, 4>());
  run(std::integral_constant<int, 3>());
  run(std::integral_constant<int, 2>());
  run(std::integral_constant<int, 1>());
}

template void multiply_tile(Work<GgmlTile<kQ4_0>>, int64_t);
template void multiply_tile(Work<GgmlTile<kQ4_1>>, int64_t);
template void multiply_tile(Work<GgmlTile<kQ5_0>>, int64_t);
template void multiply_tile(Work<GgmlTile<kQ5_1>>, int64_t);
template void multiply_tile(Work<GgmlTile<kQ8_0>>, int64_t);
template void multiply_tile(Work<GgmlTile<kQ4_K>>, int64_t);
template void multiply_tile(Work<GgmlTile<kQ5_K>>, int64_t);
template void multiply_tile(Work<GgmlTile<kQ6_K>>, int64_t);
template void multiply_tile(Work<GgmlTile<kIQ4_NL>>, int64_t);
template void multiply_tile(Work<GgmlTile<kMXFP4>>, int64_t);
template void multiply_tile(Work<GroupTile<4>>, int64_t);
template void multiply_tile(Work<GroupTile<8>>, int64_t);

}  // namespace metalcore::cpu::quant
