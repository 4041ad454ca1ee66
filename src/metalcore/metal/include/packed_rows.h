// SPDX-License-Identifier: MIT
// Rows of packed weights, read 16 values at a time: value = scale * q + least.
#pragma once

#include "ggml.h"

constant uint PIECE = 16;

struct piece {
  float q[PIECE];
  float scale;
  float least;
};

// Four bytes that start at an even one.
inline uint word_at(device const uchar* bytes) {
  device const ushort* halves = (device const ushort*)bytes;
  return halves[0] | uint(halves[1]) << 16;
}

// Rows [N, K] in blocks of ggml, whose sizes are even, but for mxfp4.
template <int TYPE>
struct ggml_rows {
  // two pieces share their bytes, so a lane takes both
  enum { IS_WHOLE = true, HAS_LEAST = !ggml<TYPE>::HAS_TABLE, AT_ONCE = 2 };
  device const uchar* blocks;
  uint K;

  piece read(uint row, uint at) const {
    const uint in_block = ggml<TYPE>::VALUES / PIECE;
    device const uchar* b =
        blocks + (ulong(row) * (K / ggml<TYPE>::VALUES) + at / in_block) * ggml<TYPE>::BYTES;
    piece p;
    read_quants(b, at % in_block, p.q);
    read_scales(b, at % in_block, p);
    return p;
  }

  static void read_quants(device const uchar* b, uint i, thread float* q) {
    const uint part = i / 2, first = i % 2 * PIECE;
    if (ggml<TYPE>::HAS_TABLE) {
#pragma unroll
      for (uint j = 0; j < PIECE; ++j) {
        const uint index = uint(b[ggml<TYPE>::BYTES - 16 + j]) >> first / 4 & 15;
        q[j] = TYPE == MXFP4 ? TWICE_E2M1[index] : NON_LINEAR[index];
      }
      return;
    }
#pragma unroll
    for (uint j = 0; j < PIECE; j += 4) {
      const float4 four = bytes_as_floats(quant_bytes(b, part, first, j));
      q[j] = four.x;
      q[j + 1] = four.y;
      q[j + 2] = four.z;
      q[j + 3] = four.w;
    }
  }

  // Quants first + j .. + 3 of a part of 32 values, one in each byte.
  static uint quant_bytes(device const uchar* b, uint part, uint first, uint j) {
    if (TYPE == Q8_0) {
      return word_at(b + 2 + first + j) ^ 0x80808080;
    }
    if (TYPE == Q6_K) {
      const uint quarter = part % 4;
      const uint low = word_at(b + part / 4 * 64 + quarter % 2 * 32 + first + j);
      const uint high = word_at(b + 128 + part / 4 * 32 + first + j);
      return (low >> quarter / 2 * 4 & 0x0f0f0f0f) | (high >> 2 * quarter & 0x03030303) << 4;
    }
    if (ggml<TYPE>::IS_K) {
      const uint low = word_at(b + ggml<TYPE>::BYTES - 128 + part / 2 * 32 + first + j);
      const uint q = low >> part % 2 * 4 & 0x0f0f0f0f;
      return TYPE == Q5_K ? q | (word_at(b + 16 + first + j) >> part & 0x01010101) << 4 : q;
    }
    const uint q = word_at(b + ggml<TYPE>::BYTES - 16 + j) >> first / 4 & 0x0f0f0f0f;
    if (ggml<TYPE>::BITS == 5) {
      const uint high = word_at(b + ggml<TYPE>::BYTES - 20) >> (first + j);
      // bits 0 to 3, each to its byte
      return q | (high & 1) << 4 | (high & 2) << 11 | (high & 4) << 18 | (high & 8) << 25;
    }
    return q;
  }

  static void read_scales(device const uchar* b, uint i, thread piece& p) {
    p.least = 0.0f;
    if (TYPE == MXFP4) {
      p.scale = half_power(b[0]);
      return;
    }
    const float d = float(*(device const half*)(TYPE == Q6_K ? b + 208 : b));
    p.scale = d;
    if (TYPE == Q6_K) {
      p.scale = d * float(char(b[192 + i]));
    }
    if (ggml<TYPE>::HAS_LEAST) {
      p.least = float(*(device const half*)(b + 2));
      if (ggml<TYPE>::IS_K) {
        const uint2 both = six_bits(b + 4, i / 2);
        p.scale = d * float(both.x);
        p.least *= -float(both.y);
      }
    } else if (HAS_LEAST) {
      p.least = p.scale * -float(ggml<TYPE>::MIDDLE);
    }
  }
};

// Rows [N, K] of 4 or 8 bits in groups along a row. IS_WHOLE: K is a multiple of 32, and rows start
// at whole words.
template <int BITS, typename S, bool HAS_BIAS, bool WHOLE>
struct group_rows {
  enum { IS_WHOLE = WHOLE, HAS_LEAST = true, AT_ONCE = 1 };
  device const uchar* packed;
  device const S* scales;
  device const S* biases;
  uint K;
  uint group;

  piece read(uint row, uint at) const {
    piece p;
    read_quants(packed + ulong(row) * ((K * BITS + 7) / 8) + at * (2 * BITS), PIECE * at, p.q);
    const ulong of = ulong(row) * ((K + group - 1) / group) + PIECE * at / group;
    p.scale = float(scales[of]);
    p.least = HAS_BIAS ? float(biases[of]) : p.scale * -float(1 << (BITS - 1));
    return p;
  }

  void read_quants(device const uchar* from, uint first, thread float* q) const {
    if (WHOLE) {
      const vec<uint, BITS / 2> words = *(device const packed_vec<uint, BITS / 2>*)from;
#pragma unroll
      for (uint j = 0; j < BITS / 2; ++j) {
        if (BITS == 8) {
          const float4 four = bytes_as_floats(words[j]);
          for (uint i = 0; i < 4; ++i) {
            q[4 * j + i] = four[i];
          }
        } else {
          const float4 even = bytes_as_floats(words[j] & 0x0f0f0f0f);
          const float4 odd = bytes_as_floats(words[j] >> 4 & 0x0f0f0f0f);
          for (uint i = 0; i < 4; ++i) {
            q[8 * j + 2 * i] = even[i];
            q[8 * j + 2 * i + 1] = odd[i];
          }
        }
      }
      return;
    }
#pragma unroll
    for (uint j = 0; j < PIECE; ++j) {
      const uint byte = first + j < K ? from[j * BITS / 8] : 0;
      q[j] = float(byte >> (BITS == 4 ? j % 2 * 4 : 0) & ((1 << BITS) - 1));
    }
  }
};
