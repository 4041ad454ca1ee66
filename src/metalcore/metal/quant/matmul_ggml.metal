// SPDX-License-Identifier: MIT
// y = x W^T, or x W, for W in blocks of ggml.
//
// matmul_ggml_few: up to COLUMNS rows of x; a simdgroup has some rows of W, a lane pieces of K.
// matmul_ggml_many: 32 or 64 rows of x and 64 of W, which are unpacked once for them.
// matmul_ggml_tiles: few rows of x, from tiles: the fields of 16 rows of W side by side, so that
// neighbours read neighbours. A group has 16 rows of W by 16 slices of K: a thread takes every 16th
// part of 32 values of its row, reads each of its words once, and multiplies it with all rows of x.
// Slices are added up in order.
// pack_ggml: makes tiles, one thread per byte.

#include "packed_product.h"

template <typename T, int TYPE, int COLUMNS>
[[max_total_threads_per_threadgroup(64)]] kernel void matmul_ggml_few(
    device const T* x [[buffer(0)]],
    device const uchar* blocks [[buffer(1)]],
    device T* y [[buffer(2)]],
    constant uint& M [[buffer(3)]],
    constant uint& N [[buffer(4)]],
    constant uint& K [[buffer(5)]],
    uint group_at [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const ggml_rows<TYPE> w = {blocks, K};
  const uint first = (2 * group_at + simdgroup) * few<COLUMNS>::ROWS;
  multiply_few<COLUMNS>(x, w, y, M, N, K, first, lane);
}

template <typename T, int TYPE, int ROWS, bool TURNED>
[[max_total_threads_per_threadgroup(128)]] kernel void matmul_ggml_many(
    device const T* x [[buffer(0)]],
    device const uchar* blocks [[buffer(1)]],
    device T* y [[buffer(2)]],
    constant uint& M [[buffer(3)]],
    constant uint& N [[buffer(4)]],
    constant uint& K [[buffer(5)]],
    uint2 tile [[threadgroup_position_in_grid]],
    uint thread_at [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup T left[ROWS * PITCH];
  threadgroup T right[STAGED];
  const ggml_rows<TYPE> w = {blocks, K};
  multiply_tiles<ROWS, TURNED>(left, right, x, w, y, M, N, K, tile, thread_at, simdgroup, lane);
}

constant uint TILE_ROWS = 16;
constant uint SLICES = 16;

// Scales of a part: of its halves, and what is added for each value.
struct part_scales {
  float scale[2];
  float least;
};

template <int TYPE>
inline part_scales scales_of(device const uchar* block, device const uchar* part, uint row) {
  part_scales s;
  s.least = 0.0f;
  if (TYPE == MXFP4) {
    s.scale[0] = s.scale[1] = half_power(block[row]);
    return s;
  }
  const float d = float(((device const half*)block)[row]);
  s.scale[0] = s.scale[1] = d;
  if (TYPE == Q6_K) {
    s.scale[0] = d * float(char(part[row]));
    s.scale[1] = d * float(char(part[TILE_ROWS + row]));
  }
  if (ggml<TYPE>::HAS_LEAST) {
    float least = float(((device const half*)block)[TILE_ROWS + row]);
    if (ggml<TYPE>::IS_K) {
      s.scale[0] = s.scale[1] = d * float(part[row]);
      least = -least * float(part[TILE_ROWS + row]);
    }
    // quants are taken from their middle on
    s.least = fma(s.scale[0], float(ggml<TYPE>::MIDDLE), least);
  }
  return s;
}

// Quants 16 h + 4 j .. + 3 of a part, as numbers.
template <int TYPE>
inline float4 quants_of(device const uint* words, uint h, uint j) {
  const uint high = ggml<TYPE>::BITS < 8 ? ggml<TYPE>::BITS - 4 : 0;
  uint w;
  if (ggml<TYPE>::BITS == 8) {
    w = words[TILE_ROWS * (4 * h + j)];
  } else {
    w = words[TILE_ROWS * (high + j)] >> 4 * h & 0x0f0f0f0f;
  }
  if (ggml<TYPE>::BITS == 5) {
    w |= (words[0] >> (4 * h + j) & 0x01010101) << 4;
  }
  if (ggml<TYPE>::BITS == 6) {
    w |= (words[TILE_ROWS * h] >> 2 * j & 0x03030303) << 4;
  }
  if (!ggml<TYPE>::HAS_TABLE) {
    return bytes_as_floats(w) - float(ggml<TYPE>::MIDDLE);
  }
  const uint4 q = uint4(w, w >> 8, w >> 16, w >> 24) & 255;
  if (TYPE == IQ4_NL) {
    return float4(NON_LINEAR[q.x], NON_LINEAR[q.y], NON_LINEAR[q.z], NON_LINEAR[q.w]);
  }
  return float4(TWICE_E2M1[q.x], TWICE_E2M1[q.y], TWICE_E2M1[q.z], TWICE_E2M1[q.w]);
}

template <typename T, int TYPE, int COLUMNS>
[[max_total_threads_per_threadgroup(256)]] kernel void matmul_ggml_tiles(
    device const T* x [[buffer(0)]],
    device const uchar* tiles [[buffer(1)]],
    device T* y [[buffer(2)]],
    constant uint& M [[buffer(3)]],
    constant uint& N [[buffer(4)]],
    constant uint& K [[buffer(5)]],
    uint3 thread_at [[thread_position_in_threadgroup]],
    uint3 group_at [[threadgroup_position_in_grid]]) {
  threadgroup float shared[SLICES * TILE_ROWS * COLUMNS];
  const uint row = thread_at.x, slice = thread_at.y, tile = group_at.z;
  const uint in_block = ggml<TYPE>::VALUES / 32;
  const uint part_bytes = ggml<TYPE>::PART_SCALES + ggml<TYPE>::PART_QUANTS;
  const ulong tile_bytes = TILE_ROWS * ggml<TYPE>::TILE_BYTES;
  tiles += tile * (K / ggml<TYPE>::VALUES) * tile_bytes;
  float sums[COLUMNS];
#pragma unroll
  for (uint m = 0; m < COLUMNS; ++m) {
    sums[m] = 0.0f;
  }
  for (uint p = slice; p < K / 32; p += SLICES) {
    device const uchar* block = tiles + p / in_block * tile_bytes;
    device const uchar* part = block + TILE_ROWS * (ggml<TYPE>::HEADER + p % in_block * part_bytes);
    const part_scales s = scales_of<TYPE>(block, part, row);
    device const uint* words = (device const uint*)(part + TILE_ROWS * ggml<TYPE>::PART_SCALES);
#pragma unroll
    for (uint h = 0; h < 2; ++h) {
      float dots[COLUMNS], totals[COLUMNS];
#pragma unroll
      for (uint m = 0; m < COLUMNS; ++m) {
        dots[m] = totals[m] = 0.0f;
      }
#pragma unroll
      for (uint j = 0; j < 4; ++j) {
        const float4 q = quants_of<TYPE>(words + row, h, j);
#pragma unroll
        for (uint m = 0; m < COLUMNS; ++m) {
          // rows past the end repeat the last one
          device const T* from = x + ulong(min(m, M - 1)) * K + (32 * p + 16 * h + 4 * j);
          const float4 v = float4(from[0], from[1], from[2], from[3]);
          dots[m] += dot(q, v);
          totals[m] += (v.x + v.y) + (v.z + v.w);
        }
      }
#pragma unroll
      for (uint m = 0; m < COLUMNS; ++m) {
        sums[m] = fma(s.scale[h], dots[m], sums[m]);
        if (ggml<TYPE>::HAS_LEAST) {
          sums[m] = fma(s.least, totals[m], sums[m]);
        }
      }
    }
  }
#pragma unroll
  for (uint m = 0; m < COLUMNS; ++m) {
    shared[(m * SLICES + slice) * TILE_ROWS + row] = sums[m];
  }
  // the sums of all slices are read below
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint n = TILE_ROWS * tile + row;
  if (slice < M && n < N) {
    float sum = 0.0f;
    for (uint i = 0; i < SLICES; ++i) {
      sum += shared[(slice * SLICES + i) * TILE_ROWS + row];
    }
    y[ulong(slice) * N + n] = T(sum);
  }
}

// Byte `at.x` of block `at.y` of tile `at.z`.
template <int TYPE>
[[max_total_threads_per_threadgroup(256)]] kernel void pack_ggml(
    device const uchar* blocks [[buffer(0)]],
    device uchar* tiles [[buffer(1)]],
    constant uint& rows [[buffer(2)]],
    constant uint& count [[buffer(3)]],
    uint3 at [[thread_position_in_grid]]) {
  const uint header = TILE_ROWS * ggml<TYPE>::HEADER;
  const uint part_scales_bytes = TILE_ROWS * ggml<TYPE>::PART_SCALES;
  const uint part_bytes = part_scales_bytes + TILE_ROWS * ggml<TYPE>::PART_QUANTS;
  const uint size = TILE_ROWS * ggml<TYPE>::TILE_BYTES;
  const bool is_header = at.x < header;
  const uint part = is_header ? 0 : (at.x - header) / part_bytes;
  const uint in_part = is_header ? 0 : (at.x - header) % part_bytes;
  const bool is_scale = !is_header && in_part < part_scales_bytes;
  const uint in_quants = in_part - (is_scale ? in_part : part_scales_bytes);
  const uint width = ggml<TYPE>::HEADER == 1 ? 1 : 2;
  const uint row = is_header  ? at.x % (TILE_ROWS * width) / width
                   : is_scale ? in_part % TILE_ROWS
                              : in_quants / 4 % TILE_ROWS;
  const uint n = TILE_ROWS * at.z + row;
  uint found = 0;
  if (n < rows) {
    device const uchar* b = blocks + (ulong(n) * count + at.y) * ggml<TYPE>::BYTES;
    if (is_header) {
      const uint field = at.x / (TILE_ROWS * width);
      found = b[(TYPE == Q6_K ? 208 : 0) + field * width + at.x % width];
    } else if (is_scale) {
      const uint which = in_part / TILE_ROWS;
      if (TYPE == Q6_K) {
        found = b[192 + 2 * part + which];
      } else {
        const uint2 both = six_bits(b + 4, part);
        found = which ? both.y : both.x;
      }
    } else {
      const uint word = in_quants / (4 * TILE_ROWS), byte = in_quants % 4, first = 32 * part + byte;
      const uint high = ggml<TYPE>::BITS < 8 ? ggml<TYPE>::BITS - 4 : 0;
      if (ggml<TYPE>::BITS == 8) {
        found = ggml_quant<TYPE>(b, first + 4 * word);
      } else if (word < high) {
        for (uint j = 0; j < 8 / max(high, 1u); ++j) {
          const uint i = first + 32 / max(high, 1u) * word + 4 * j;
          found |= ggml_quant<TYPE>(b, i) >> 4 << high * j;
        }
      } else {
        const uint i = first + 4 * (word - high);
        found = (ggml_quant<TYPE>(b, i) & 15) | (ggml_quant<TYPE>(b, i + 16) & 15) << 4;
      }
    }
  }
  tiles[(ulong(at.z) * count + at.y) * size + at.x] = uchar(found);
}
