// SPDX-License-Identifier: MIT
// y = x W^T, or x W, for W of 4 or 8 bits in groups along its rows: as matmul_ggml.metal.

#include "packed_product.h"

template <typename T, int BITS, typename S, bool HAS_BIAS, bool WHOLE, int COLUMNS>
[[max_total_threads_per_threadgroup(64)]] kernel void matmul_int_few(
    device const T* x [[buffer(0)]],
    device const uchar* packed [[buffer(1)]],
    device const S* scales [[buffer(2)]],
    device const S* biases [[buffer(3)]],
    device T* y [[buffer(4)]],
    constant uint& M [[buffer(5)]],
    constant uint& N [[buffer(6)]],
    constant uint& K [[buffer(7)]],
    constant uint& group [[buffer(8)]],
    uint group_at [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const group_rows<BITS, S, HAS_BIAS, WHOLE> w = {packed, scales, biases, K, group};
  const uint first = (2 * group_at + simdgroup) * few<COLUMNS>::ROWS;
  multiply_few<COLUMNS>(x, w, y, M, N, K, first, lane);
}

template <typename T, int BITS, typename S, bool HAS_BIAS, bool WHOLE, int ROWS, bool TURNED>
[[max_total_threads_per_threadgroup(128)]] kernel void matmul_int_many(
    device const T* x [[buffer(0)]],
    device const uchar* packed [[buffer(1)]],
    device const S* scales [[buffer(2)]],
    device const S* biases [[buffer(3)]],
    device T* y [[buffer(4)]],
    constant uint& M [[buffer(5)]],
    constant uint& N [[buffer(6)]],
    constant uint& K [[buffer(7)]],
    constant uint& group [[buffer(8)]],
    uint2 tile [[threadgroup_position_in_grid]],
    uint thread_at [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup T left[ROWS * PITCH];
  threadgroup T right[STAGED];
  const group_rows<BITS, S, HAS_BIAS, WHOLE> w = {packed, scales, biases, K, group};
  multiply_tiles<ROWS, TURNED>(left, right, x, w, y, M, N, K, tile, thread_at, simdgroup, lane);
}

// What a CPU multiplies by: byte `at.x` of group `at.y` of tile `at.z`, which is 16 rows side by
// side.
template <int BITS, typename S, bool HAS_BIAS>
[[max_total_threads_per_threadgroup(256)]] kernel void pack_int(
    device const uchar* packed [[buffer(0)]],
    device const S* scales [[buffer(1)]],
    device const S* biases [[buffer(2)]],
    device uchar* tiles [[buffer(3)]],
    constant uint& rows [[buffer(4)]],
    constant uint& K [[buffer(5)]],
    constant uint& group [[buffer(6)]],
    uint3 at [[thread_position_in_grid]]) {
  const uint groups = (K + group - 1) / group;
  const uint width = sizeof(S), field = 16 * width, header = field * (HAS_BIAS ? 2 : 1);
  const uint size = header + group * BITS * 2;
  const bool is_header = at.x < header;
  const uint in_part = is_header ? 0 : (at.x - header) % (64 * BITS);
  const uint row = 16 * at.z + (is_header ? at.x % field / width : in_part % 64 / 4);
  uint found = 0;
  if (row < rows && is_header) {
    device const S* from = at.x < field ? scales : biases;
    found = ((device const uchar*)(from + (ulong(row) * groups + at.y)))[at.x % width];
  } else if (row < rows) {
    const uint part = (at.x - header) / (64 * BITS);
    const uint k = at.y * group + 32 * part + in_part / 64 * 4 + in_part % 4;
    device const uchar* from = packed + ulong(row) * ((K * BITS + 7) / 8);
    if (BITS == 8) {
      found = k < K ? from[k] : 0;
    } else {
      const uint low = k < K ? from[k / 2] >> k % 2 * 4 & 15 : 0;
      const uint high = k + 16 < K ? from[k / 2 + 8] >> k % 2 * 4 & 15 : 0;
      found = low | high << 4;
    }
  }
  tiles[(ulong(at.z) * groups + at.y) * size + at.x] = uchar(found);
}
