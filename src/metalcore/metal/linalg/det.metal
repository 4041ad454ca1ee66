// SPDX-License-Identifier: MIT
// det A = sign(P) prod_i u_ii of A = P L U, its sign, and log |det A|. The sign of P is that of the
// number of pairs of rows in falling order. Exponents are added up apart from the product: it stays
// in range.
//
// det_simdgroup: n <= WIDTH, one matrix per WIDTH lanes. det_threadgroup: n <= 64, one matrix per
// threadgroup of 64 threads. det_of_factors: from rows and U, for larger ones.

#include "lu.h"

// The product of numbers below 1 in size, times 2 to an exponent.
struct scaled_product {
  float product;
  int exponent;
};

inline scaled_product scaled(float product, int exponent) {
  int own;
  const float mantissa = frexp(product, own);
  return {mantissa, exponent + own};
}

// Over the WIDTH lanes that hold a matrix.
template <int WIDTH>
inline scaled_product product_of(scaled_product x) {
  for (ushort d = WIDTH / 2; d > 0; d /= 2) {
    const float other = simd_shuffle_xor(x.product, d);
    x = scaled(x.product * other, x.exponent + simd_shuffle_xor(x.exponent, d));
  }
  return x;
}

inline void write_det(
    scaled_product x, device float& det, device float& sign_of, device float& logabsdet) {
  const float size = fabs(x.product);
  det = ldexp(x.product, x.exponent);
  sign_of = size > 0.0f ? (x.product > 0.0f ? 1.0f : -1.0f) : x.product;
  logabsdet = precise::log(size) + float(x.exponent) * 0.69314718056f;
}

template <int WIDTH, int SIMDGROUPS>
[[max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] kernel void det_simdgroup(
    device const float* A [[buffer(0)]],
    device float* det [[buffer(1)]],
    device float* sign_of [[buffer(2)]],
    device float* logabsdet [[buffer(3)]],
    constant uint& batch [[buffer(4)]],
    constant uint& n [[buffer(5)]],
    uint thread_index [[thread_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int LD = WIDTH + 1;
  threadgroup float tiles[SIMDGROUPS * 32 * LD];
  threadgroup float* tile = tiles + simdgroup * 32 * LD;
  const uint first = thread_index / 32 * (32 / WIDTH);
  if (first >= batch) {
    return;
  }
  const int count = min(batch - first, uint(32 / WIDTH));
  const int row = int(lane % WIDTH);
  const int rows = int(n);
  load_rows<WIDTH, LD>(A + ulong(first) * (n * n), rows, rows, rows, count, lane, tile);
  // the rows are in the tile
  simdgroup_barrier(mem_flags::mem_threadgroup);
  const bool mine = int(lane / WIDTH) < count && row < rows;
  const ushort base = ushort(lane - row);
  const int position =
      factor_in_lanes<WIDTH>(tile + lane * LD, mine, rows, rows, row, base).position;

  const float pivot = row < rows ? tile[lane * LD + position] : 1.0f;
  int falling = 0;
  for (int k = 0; k < WIDTH; ++k) {
    const int other = simd_shuffle(position, base + k);
    falling += k > row && other < position ? 1 : 0;
  }
  const scaled_product own = scaled(falling % 2 == 0 ? pivot : -pivot, 0);
  const scaled_product all = product_of<WIDTH>(own);
  const uint matrix = first + lane / WIDTH;
  if (mine && row == 0) {
    write_det(all, det[matrix], sign_of[matrix], logabsdet[matrix]);
  }
}

[[max_total_threads_per_threadgroup(64)]] kernel void det_threadgroup(
    device const float* A [[buffer(0)]],
    device float* det [[buffer(1)]],
    device float* sign_of [[buffer(2)]],
    device float* logabsdet [[buffer(3)]],
    constant uint& n [[buffer(4)]],
    uint matrix [[threadgroup_position_in_grid]],
    uint thread_index [[thread_position_in_threadgroup]]) {
  threadgroup float a[4160];
  threadgroup float found[4];
  threadgroup int place[4];
  threadgroup int positions[64];
  threadgroup float products[2];
  threadgroup int exponents[2];
  const int rows = int(n);
  const int row = int(thread_index);
  A += ulong(matrix) * (n * n);
  for (int e = row; e < rows * rows; e += 64) {
    a[e / rows * 65 + e % rows] = A[e];
  }
  // all of A is there
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int position;
  int info;
  factor_in_threadgroup(a, found, place, rows, rows, row, position, info);
  positions[row] = position;
  // every row's position is there
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int falling = 0;
  for (int k = row + 1; k < rows; ++k) {
    falling += positions[k] < position ? 1 : 0;
  }
  const float pivot = row < rows ? a[row * 65 + position] : 1.0f;
  scaled_product own = scaled(row < rows && falling % 2 != 0 ? -pivot : pivot, 0);
  own = product_of<32>(own);
  if (row % 32 == 0) {
    products[row / 32] = own.product;
    exponents[row / 32] = own.exponent;
  }
  // the parts of both simdgroups are there
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (row == 0) {
    own = scaled(own.product * products[1], own.exponent + exponents[1]);
    write_det(own, det[matrix], sign_of[matrix], logabsdet[matrix]);
  }
}

// One threadgroup per matrix; its threads share the pivots and the pairs of rows.
[[max_total_threads_per_threadgroup(64)]] kernel void det_of_factors(
    device const long* rows [[buffer(0)]],
    device const float* U [[buffer(1)]],
    device float* det [[buffer(2)]],
    device float* sign_of [[buffer(3)]],
    device float* logabsdet [[buffer(4)]],
    constant uint& n [[buffer(5)]],
    uint matrix [[threadgroup_position_in_grid]],
    uint thread_index [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup float products[32];
  threadgroup int exponents[32];
  rows += ulong(matrix) * n;
  U += ulong(matrix) * (n * n);
  scaled_product own = {1.0f, 0};
  int falling = 0;
  for (uint i = thread_index; i < n; i += threads) {
    own = scaled(own.product * U[i * n + i], own.exponent);
    for (uint j = i + 1; j < n; ++j) {
      falling += rows[j] < rows[i] ? 1 : 0;
    }
  }
  own.product = falling % 2 == 0 ? own.product : -own.product;
  own = scaled(simd_product(own.product), simd_sum(own.exponent));
  if (thread_index % 32 == 0) {
    products[thread_index / 32] = own.product;
    exponents[thread_index / 32] = own.exponent;
  }
  // the parts of all simdgroups are there
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index == 0) {
    for (uint s = 1; s < threads / 32; ++s) {
      own = scaled(own.product * products[s], own.exponent + exponents[s]);
    }
    write_det(own, det[matrix], sign_of[matrix], logabsdet[matrix]);
  }
}
