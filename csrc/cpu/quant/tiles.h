// SPDX-License-Identifier: MIT
// Tiles: the fields of 16 rows side by side, one row per lane. A tile is a run of blocks, each a
// header and then parts of 32 values with a header and their quants:
//   4 bits: 4 words per row, value i and i + 16 in one byte; 8 bits: 8 words
//   5 bits: before the nibbles, a word whose byte b has at bit j the fifth bit of value 4 j + b
//   6 bits: two words; byte b of word w has at bit 2 j the high pair of value 16 w + 4 j + b
// A format says where scales are and what they mean:
//   value = scale (q - kMiddle) + least, with a scale for 32 values or for 16; q <= kLargest
#pragma once

#include "formats.h"

namespace metalcore::cpu::quant {

using simd::Bits;
using simd::FloatVec;
using simd::SignedBits;

constexpr int64_t kRows = 16;
constexpr int64_t kLanes = simd::kLanes<float>;
// Registers for the rows of a tile.
constexpr int kVectors = int(kRows / kLanes);

inline FloatVec to_float(SignedBits v) { return __builtin_convertvector(v, FloatVec); }

// The numbers of the rows of register v.
inline FloatVec halves(const uint8_t* p, int v) {
  return simd::widen(simd::load_as<simd::HalfBits>(p + 2 * kLanes * v));
}
inline FloatVec bfloats(const uint8_t* p, int v) {
  const auto raw = simd::load_as<simd::HalfBits>(p + 2 * kLanes * v);
  return simd::bits_as<FloatVec>(__builtin_convertvector(raw, Bits) << 16);
}
inline FloatVec floats(const uint8_t* p, int v) {
  return simd::load_as<FloatVec>(p + 4 * kLanes * v);
}
inline FloatVec unsigned_bytes(const uint8_t* p, int v) {
  return to_float(simd::bits_as<SignedBits>(simd::widen_bytes(p + kLanes * v)));
}
inline FloatVec signed_bytes(const uint8_t* p, int v) {
  return to_float(simd::widen_signed_bytes(p + kLanes * v));
}

constexpr int quant_bytes(int bits) {
  return bits == 4 ? 16 : bits == 5 ? 20 : bits == 6 ? 24 : 32;
}

// Every byte of v, up to 15, replaced by the number in the table.
inline Bits look_up(const uint8_t* table, Bits v) {
#if defined(__AVX512F__)
  const __m128i t = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (Bits)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(t), (__m512i)v);
#elif defined(__AVX2__)
  const __m128i t = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (Bits)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(t), (__m256i)v);
#elif defined(__aarch64__)
  return (Bits)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)v);
#else
  uint8_t raw[sizeof(Bits)];
  std::memcpy(raw, &v, sizeof(v));
  for (auto& b : raw) b = table[b];
  return simd::load_as<Bits>(raw);
#endif
}

// The quants of values 4 j .. 4 j + 3 for the rows of register v, in w[j].
template <int bits>
inline __attribute__((always_inline)) void load_quants(const uint8_t* p, int v, Bits* w) {
  const auto word = [&](int i) { return simd::load_as<Bits>(p + 4 * (kRows * i + kLanes * v)); };
  if constexpr (bits == 8) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) w[j] = word(j);
  } else {
    constexpr int kHigh = bits - 4;
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const Bits raw = word(kHigh + j);
      w[j] = raw & 0x0f0f0f0f;
      w[j + 4] = raw >> 4 & 0x0f0f0f0f;
    }
    if constexpr (bits == 5) {
      const Bits high = word(0);
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) w[j] |= (high >> j & 0x01010101) << 4;
    } else if constexpr (bits == 6) {
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) w[j] |= (word(j / 4) >> 2 * (j % 4) & 0x03030303) << 4;
    }
  }
}

// Scales of a part of 32 values, for the rows of one register: scale[1] where 16 values have one.
struct PartScales {
  FloatVec scale[2], least;
};

template <int64_t type>
struct GgmlTile {
  static constexpr bool kIsK = type == kQ4_K || type == kQ5_K;
  static constexpr bool kHasTable = type == kIQ4_NL || type == kMXFP4;
  static constexpr int kBits = type == kQ8_0                                     ? 8
                               : type == kQ6_K                                   ? 6
                               : type == kQ5_0 || type == kQ5_1 || type == kQ5_K ? 5
                                                                                 : 4;
  static constexpr bool kHasLeast = kIsK || type == kQ4_1 || type == kQ5_1;
  static constexpr int kScales = type == kQ6_K ? 2 : 1;
  static constexpr int kMiddle = kHasLeast         ? 0
                                 : type == kIQ4_NL ? 127
                                 : type == kMXFP4  ? 12
                                                   : 1 << (kBits - 1);
  static constexpr int kLargest = type == kIQ4_NL ? 240 : type == kMXFP4 ? 24 : (1 << kBits) - 1;

  int parts() const { return int(block_values(type) / 32); }
  // Bytes per row.
  int header() const { return type == kMXFP4 ? 1 : kHasLeast ? 4 : 2; }
  static constexpr int part_header() { return kIsK || type == kQ6_K ? 2 : 0; }

  void scales(const uint8_t* header, const uint8_t* part, int v, PartScales& s) const {
    if constexpr (type == kMXFP4) {
      const Bits e = simd::widen_bytes(header + kLanes * v);
      const Bits small = e == 0 ? Bits{} + 0x00200000 : Bits{} + 0x00400000;
      s.scale[0] = simd::bits_as<FloatVec>(e < 2 ? small : (e - 1) << 23);
      return;
    }
    const FloatVec d = halves(header, v);
    if constexpr (kIsK) {
      s.scale[0] = d * unsigned_bytes(part, v);
      s.least = -(halves(header + 2 * kRows, v) * unsigned_bytes(part + kRows, v));
    } else if constexpr (type == kQ6_K) {
      s.scale[0] = d * signed_bytes(part, v);
      s.scale[1] = d * signed_bytes(part + kRows, v);
    } else {
      s.scale[0] = d;
      if constexpr (kHasLeast) s.least = halves(header + 2 * kRows, v);
    }
  }

  static __attribute__((always_inline)) void quants(const uint8_t* p, int v, Bits* w) {
    load_quants<kBits>(p, v, w);
    if constexpr (kHasTable) {
      alignas(16) static constexpr auto kTable = [] {
        std::array<uint8_t, 16> t{};
        for (int i = 0; i < 16; ++i) {
          t[i] = uint8_t((type == kIQ4_NL ? kNonLinear[i] : kTwiceE2M1[i]) + kMiddle);
        }
        return t;
      }();
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) w[j] = look_up(kTable.data(), w[j]);
    }
  }
};

// Weights in groups of a row, scale q + bias or scale (q - middle); scales as they were given.
template <int bits>
struct GroupTile {
  static constexpr int kBits = bits, kScales = 1, kMiddle = 1 << (bits - 1);
  static constexpr int kLargest = (1 << bits) - 1;
  static constexpr bool kHasLeast = true;

  int64_t group;
  ScalarType dtype;
  bool has_bias;

  int scale_bytes() const { return dtype == ScalarType::Float ? 4 : 2; }
  int parts() const { return int(group / 32); }
  int header() const { return scale_bytes() * (has_bias ? 2 : 1); }
  static constexpr int part_header() { return 0; }

  FloatVec numbers(const uint8_t* p, int v) const {
    if (dtype == ScalarType::Float) return floats(p, v);
    return dtype == ScalarType::Half ? halves(p, v) : bfloats(p, v);
  }

  void scales(const uint8_t* header, const uint8_t*, int v, PartScales& s) const {
    s.scale[0] = numbers(header, v);
    s.least = FloatVec{};
    if (has_bias) {
      s.least = s.scale[0] * float(kMiddle) + numbers(header + kRows * scale_bytes(), v);
    }
  }

  static __attribute__((always_inline)) void quants(const uint8_t* p, int v, Bits* w) {
    load_quants<bits>(p, v, w);
  }
};

template <typename Format>
int64_t block_tile_bytes(const Format& f) {
  return kRows * (f.header() + f.parts() * int64_t(f.part_header() + quant_bytes(Format::kBits)));
}

// Quants q[32] of row r to where they stand in a part.
template <int bits>
inline void put_row_quants(const uint8_t* q, int64_t r, uint8_t* part) {
  const auto word = [&](int i) { return part + 4 * (kRows * i + r); };
  if constexpr (bits == 8) {
    for (int j = 0; j < 8; ++j) std::memcpy(word(j), q + 4 * j, 4);
  } else {
    constexpr int kHigh = bits - 4;
    for (int j = 0; j < 4; ++j) {
      for (int b = 0; b < 4; ++b) {
        word(kHigh + j)[b] = uint8_t((q[4 * j + b] & 15) | (q[16 + 4 * j + b] & 15) << 4);
      }
    }
    if constexpr (kHigh > 0) {
      for (int w = 0; w < kHigh; ++w) {
        for (int b = 0; b < 4; ++b) {
          uint8_t high = 0;
          for (int j = 0; j < 8 / kHigh; ++j) {
            high |= uint8_t(q[32 / kHigh * w + 4 * j + b] >> 4 << kHigh * j);
          }
          word(w)[b] = high;
        }
      }
    }
  }
}

// A tile of up to 16 rows of `blocks` blocks each; `to` must be zero where rows are missing.
template <int64_t type>
void pack_tile(const uint8_t* from, int64_t rows, int64_t blocks, uint8_t* to) {
  const GgmlTile<type> f;
  const int64_t size = block_tile_bytes(f);
  if (rows < kRows) std::fill_n(to, blocks * size, uint8_t(0));
  for (int64_t b = 0; b < blocks; ++b, to += size) {
    for (int64_t r = 0; r < rows; ++r) {
      const uint8_t* block = from + (r * blocks + b) * block_bytes(type);
      const uint8_t* d = type == kQ6_K ? block + 208 : block;
      if (type == kMXFP4) {
        to[r] = d[0];
      } else {
        std::memcpy(to + 2 * r, d, 2);
        if (f.kHasLeast) std::memcpy(to + 2 * (kRows + r), d + 2, 2);
      }
      uint8_t* part = to + kRows * f.header();
      for (int p = 0; p < f.parts(); ++p) {
        if constexpr (GgmlTile<type>::kIsK) six_bits(block + 4, p, part + r, part + kRows + r);
        if constexpr (type == kQ6_K) {
          part[r] = block[192 + 2 * p];
          part[kRows + r] = block[193 + 2 * p];
        }
        part += kRows * f.part_header();
        uint8_t q[32];
        part_quants<type>(block, p, q);
        put_row_quants<f.kBits>(q, r, part);
        part += kRows * quant_bytes(f.kBits);
      }
    }
  }
}

}  // namespace metalcore::cpu::quant
