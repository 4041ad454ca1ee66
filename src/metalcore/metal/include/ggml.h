// SPDX-License-Identifier: MIT
// The block formats of ggml, by their numbers in files: where fields are, and the values of blocks.
#pragma once

#include <metal_stdlib>
using namespace metal;

enum ggml_type {
  Q4_0 = 2,
  Q4_1 = 3,
  Q5_0 = 6,
  Q5_1 = 7,
  Q8_0 = 8,
  Q4_K = 12,
  Q5_K = 13,
  Q6_K = 14,
  IQ4_NL = 20,
  MXFP4 = 39,
};

constant float NON_LINEAR[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                 1,    13,   25,  38,  53,  69,  89,  113};
// Twice the values of E2M1; scales are halved for it.
constant float TWICE_E2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

template <int TYPE>
struct ggml {
  enum {
    IS_K = TYPE == Q4_K || TYPE == Q5_K,
    IS_LARGE = IS_K || TYPE == Q6_K,
    HAS_LEAST = IS_K || TYPE == Q4_1 || TYPE == Q5_1,
    HAS_TABLE = TYPE == IQ4_NL || TYPE == MXFP4,
    BITS = TYPE == Q8_0                            ? 8
    : TYPE == Q6_K                                 ? 6
    : TYPE == Q5_0 || TYPE == Q5_1 || TYPE == Q5_K ? 5
                                                   : 4,
    // of a block
    VALUES = IS_LARGE ? 256 : 32,
    HEADER = TYPE == MXFP4 ? 1
    : HAS_LEAST            ? 4
                           : 2,
    BYTES = TYPE == Q6_K ? 210 : HEADER + (IS_K ? 12 : 0) + VALUES * BITS / 8,
    // what a quant of that value stands for: zero
    MIDDLE = 1 << (BITS - 1),
    // bytes per row of a part of 32 values in a tile: scales of their own, then quants
    PART_SCALES = IS_LARGE ? 2 : 0,
    PART_QUANTS = 4 * BITS,
    TILE_BYTES = HEADER + VALUES / 32 * (PART_SCALES + PART_QUANTS),
  };
};

inline float half_at(device const uchar* p) {
  return float(as_type<half>(ushort(p[0] | uint(p[1]) << 8)));
}

// The bytes of a word as numbers: 0x4b000000 | b is 2^23 + b. To convert integers takes longer.
inline float4 bytes_as_floats(uint w) {
  const uint high = w >> 16;
  return float4(
      as_type<float>((w & 0x00ff) | 0x4b000000) - 8388608.0f,
      fma(as_type<float>((w & 0xff00) | 0x4b000000), 1.0f / 256, -32768.0f),
      as_type<float>((high & 0x00ff) | 0x4b000000) - 8388608.0f,
      fma(as_type<float>((high & 0xff00) | 0x4b000000), 1.0f / 256, -32768.0f));
}

// Half of the power of two that an exponent byte stands for.
inline float half_power(uint e) { return as_type<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23); }

// Scale and minimum of group g of q4_K and q5_K, from their 12 bytes.
inline uint2 six_bits(device const uchar* s, uint g) {
  if (g < 4) {
    return uint2(s[g] & 63, s[g + 4] & 63);
  }
  const uint both = s[g + 4];
  return uint2((both & 15) | uint(s[g - 4] >> 6) << 4, both >> 4 | uint(s[g] >> 6) << 4);
}

// Quant i of a block, from 0 on.
template <int TYPE>
inline uint ggml_quant(device const uchar* b, uint i) {
  if (TYPE == Q8_0) {
    return b[2 + i] ^ 0x80;
  }
  if (TYPE == Q6_K) {
    const uint part = i / 32 % 4, l = i % 32;
    const uint low = b[i / 128 * 64 + part % 2 * 32 + l];
    const uint high = uint(b[128 + i / 128 * 32 + l]) >> 2 * part & 3;
    return (part < 2 ? low & 15 : low >> 4) | high << 4;
  }
  if (ggml<TYPE>::IS_K) {
    const uint g = i / 32, l = i % 32;
    const uint both = b[ggml<TYPE>::BYTES - 128 + g / 2 * 32 + l];
    const uint low = g % 2 ? both >> 4 : both & 15;
    return TYPE == Q5_K ? low | (uint(b[16 + l]) >> g & 1) << 4 : low;
  }
  const uint both = b[ggml<TYPE>::BYTES - 16 + i % 16];
  const uint low = i < 16 ? both & 15 : both >> 4;
  if (ggml<TYPE>::BITS == 5) {
    return low | (uint(b[ggml<TYPE>::BYTES - 20 + i / 8]) >> i % 8 & 1) << 4;
  }
  return low;
}

// Value i of a block.
template <int TYPE>
inline float ggml_value(device const uchar* b, uint i) {
  const uint q = ggml_quant<TYPE>(b, i);
  if (TYPE == MXFP4) {
    return half_power(b[0]) * TWICE_E2M1[q];
  }
  const float d = half_at(TYPE == Q6_K ? b + 208 : b);
  if (TYPE == IQ4_NL) {
    return d * NON_LINEAR[q];
  }
  if (TYPE == Q6_K) {
    return d * float(char(b[192 + i / 16])) * float(int(q) - 32);
  }
  if (ggml<TYPE>::IS_K) {
    const uint2 s = six_bits(b + 4, i / 32);
    return d * float(s.x) * float(q) - half_at(b + 2) * float(s.y);
  }
  if (ggml<TYPE>::HAS_LEAST) {
    return d * float(q) + half_at(b + 2);
  }
  return d * float(int(q) - int(ggml<TYPE>::MIDDLE));
}
