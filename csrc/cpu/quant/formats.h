// SPDX-License-Identifier: MIT
// The block formats of ggml: bytes, and the values that they stand for. A row is a run of blocks.
#pragma once

#include <cmath>
#include <vector>

#include "../common/tensor.h"

namespace metalcore::cpu::quant {

// Their numbers in files.
enum Type : int64_t {
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kIQ4_NL = 20,
  kMXFP4 = 39,
};

constexpr int8_t kNonLinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                   1,    13,   25,  38,  53,  69,  89,  113};
// Twice the values of E2M1; scales are halved for it.
constexpr int8_t kTwiceE2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

constexpr int64_t block_values(int64_t type) {
  return type == kQ4_K || type == kQ5_K || type == kQ6_K ? 256 : 32;
}

constexpr int64_t block_bytes(int64_t type) {
  switch (type) {
    case kQ4_0:
    case kIQ4_NL:
      return 18;
    case kQ4_1:
      return 20;
    case kQ5_0:
      return 22;
    case kQ5_1:
      return 24;
    case kQ8_0:
      return 34;
    case kQ4_K:
      return 144;
    case kQ5_K:
      return 176;
    case kQ6_K:
      return 210;
    case kMXFP4:
      return 17;
  }
  return 0;
}

// Calls body(std::integral_constant<int64_t, type>()).
template <typename Body>
auto dispatch_type(const char* op, int64_t type, Body body) {
  switch (type) {
#define MC_TYPE(name) \
  case name:          \
    return body(std::integral_constant<int64_t, name>());
    MC_TYPE(kQ4_0)
    MC_TYPE(kQ4_1)
    MC_TYPE(kQ5_0)
    MC_TYPE(kQ5_1)
    MC_TYPE(kQ8_0)
    MC_TYPE(kQ4_K)
    MC_TYPE(kQ5_K)
    MC_TYPE(kQ6_K)
    MC_TYPE(kIQ4_NL)
    MC_TYPE(kMXFP4)
#undef MC_TYPE
    default:
      STD_TORCH_CHECK(false, op, ": no type of ggml that is known here has the number ", type);
  }
}

inline float half_at(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, sizeof(bits));
  return c10::detail::fp16_ieee_to_fp32_value(bits);
}

inline void put_half(uint8_t* p, float v) {
  const uint16_t bits = c10::detail::fp16_ieee_from_fp32_value(v);
  std::memcpy(p, &bits, sizeof(bits));
}

// Half of the power of two that an exponent byte stands for.
inline float half_power(uint8_t e) {
  const uint32_t bits = e < 2 ? 0x00200000u << e : uint32_t(e - 1) << 23;
  return simd::bits_as<float>(bits);
}

// Scale and minimum of group g of q4_K and q5_K, from their 12 bytes.
inline void six_bits(const uint8_t* s, int g, uint8_t* scale, uint8_t* least) {
  if (g < 4) {
    *scale = s[g] & 63;
    *least = s[g + 4] & 63;
  } else {
    *scale = uint8_t((s[g + 4] & 15) | (s[g - 4] >> 6) << 4);
    *least = uint8_t((s[g + 4] >> 4) | (s[g] >> 6) << 4);
  }
}

// The quants of part `p` of 32 values of a block, from 0 on.
template <int64_t type>
inline void part_quants(const uint8_t* b, int p, uint8_t* q) {
  if constexpr (type == kQ8_0) {
    for (int i = 0; i < 32; ++i) q[i] = b[2 + i] ^ 0x80;
  } else if constexpr (type == kQ4_K || type == kQ5_K) {
    const uint8_t* low = b + block_bytes(type) - 128 + p / 2 * 32;
    for (int i = 0; i < 32; ++i) q[i] = p & 1 ? low[i] >> 4 : low[i] & 15;
    if (type == kQ5_K) {
      for (int i = 0; i < 32; ++i) q[i] |= uint8_t((b[16 + i] >> p & 1) << 4);
    }
  } else if constexpr (type == kQ6_K) {
    const int in_half = p % 4;
    const uint8_t *low = b + p / 4 * 64 + in_half % 2 * 32, *high = b + 128 + p / 4 * 32;
    for (int i = 0; i < 32; ++i) {
      q[i] = uint8_t((in_half < 2 ? low[i] & 15 : low[i] >> 4) | (high[i] >> 2 * in_half & 3) << 4);
    }
  } else {
    const uint8_t* low = b + block_bytes(type) - 16;
    for (int i = 0; i < 16; ++i) {
      q[i] = low[i] & 15;
      q[i + 16] = low[i] >> 4;
    }
    if (type == kQ5_0 || type == kQ5_1) {
      uint32_t high;
      std::memcpy(&high, low - 4, sizeof(high));
      for (int i = 0; i < 32; ++i) q[i] |= uint8_t((high >> i & 1) << 4);
    }
  }
}

// The values of one block; each is rounded once at most.
template <int64_t type>
inline void block_floats(const uint8_t* b, float* y) {
  constexpr int kParts = int(block_values(type) / 32);
  const float d = type == kMXFP4 ? half_power(b[0]) : type == kQ6_K ? half_at(b + 208) : half_at(b);
  for (int p = 0; p < kParts; ++p, y += 32) {
    uint8_t q[32];
    part_quants<type>(b, p, q);
    if constexpr (type == kQ4_1 || type == kQ5_1) {
      const float m = half_at(b + 2);
      for (int i = 0; i < 32; ++i) y[i] = d * float(q[i]) + m;
    } else if constexpr (type == kQ4_K || type == kQ5_K) {
      uint8_t scale, least;
      six_bits(b + 4, p, &scale, &least);
      const float s = d * float(scale), m = half_at(b + 2) * float(least);
      for (int i = 0; i < 32; ++i) y[i] = s * float(q[i]) - m;
    } else if constexpr (type == kQ6_K) {
      for (int i = 0; i < 32; ++i) {
        y[i] = d * float(int8_t(b[192 + 2 * p + i / 16])) * float(int(q[i]) - 32);
      }
    } else if constexpr (type == kIQ4_NL || type == kMXFP4) {
      const int8_t* table = type == kIQ4_NL ? kNonLinear : kTwiceE2M1;
      for (int i = 0; i < 32; ++i) y[i] = d * float(table[q[i]]);
    } else {
      constexpr int kMiddle = type == kQ4_0 ? 8 : type == kQ5_0 ? 16 : 128;
      for (int i = 0; i < 32; ++i) y[i] = d * float(int(q[i]) - kMiddle);
    }
  }
}

template <int64_t type, typename T>
inline void row_floats(const uint8_t* row, int64_t blocks, T* y) {
  constexpr int64_t n = block_values(type);
  for (int64_t b = 0; b < blocks; ++b, row += block_bytes(type), y += n) {
    float values[n];
    block_floats<type>(row, values);
    for (int64_t i = 0; i < n; ++i) y[i] = T(values[i]);
  }
}

inline void expect_bytes(const char* op, const Tensor& x) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Byte, op, ": packed weights must be uint8");
}

inline const uint8_t* bytes(const Tensor& x) {
  expect_bytes("metalcore", x);
  return static_cast<const uint8_t*>(x.const_data_ptr());
}

inline uint8_t* mutable_bytes(const Tensor& x) {
  expect_bytes("metalcore", x);
  return static_cast<uint8_t*>(x.mutable_data_ptr());
}

// uint8 [..., whole blocks], dense.
inline Tensor expect_blocks(const char* op, const Tensor& blocks, int64_t type) {
  STD_TORCH_CHECK(block_bytes(type) > 0, op, ": no type of ggml has the number ", type);
  expect_bytes(op, blocks);
  STD_TORCH_CHECK(blocks.dim() > 0 && blocks.size(blocks.dim() - 1) % block_bytes(type) == 0, op,
                  ": blocks must be [..., whole blocks]");
  return dense(blocks);
}

inline void expect_matrix(const char* op, const Tensor& blocks) {
  STD_TORCH_CHECK(blocks.dim() == 2, op, ": blocks must be [N, bytes of a row]");
}

// An unwritten tensor of the sizes of x with another last one.
inline Tensor empty_with_last(const Tensor& x, int64_t last, ScalarType dtype) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = last;
  return empty(sizes.data(), int64_t(sizes.size()), dtype);
}

// How many rows the dimensions before the last one make.
inline int64_t rows_of(const Tensor& x) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  return rows;
}

}  // namespace metalcore::cpu::quant
