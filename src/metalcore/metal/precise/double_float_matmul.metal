// SPDX-License-Identifier: MIT
// Y = A B, or with REST what is left of C: Y = C - D - A B, where each number is a sum of two
// floats.
//
// A threadgroup computes a tile of 16 x 16 values of one matrix, a thread one of them. A product is
// added up as two floats, which are brought together after every 16 terms; what is left, as three:
// of large numbers that cancel, 48 bits remain.

#include "double_float.h"

constant uint TILE = 16;

template <bool REST>
[[max_total_threads_per_threadgroup(256)]] kernel void double_float_matmul(
    device const float* A [[buffer(0)]],
    device const float* A_low [[buffer(1)]],
    device const float* B [[buffer(2)]],
    device const float* B_low [[buffer(3)]],
    device const float* C [[buffer(4)]],
    device const float* C_low [[buffer(5)]],
    device const float* D [[buffer(6)]],
    device const float* D_low [[buffer(7)]],
    device float* Y [[buffer(8)]],
    device float* Y_low [[buffer(9)]],
    constant uint& M [[buffer(10)]],
    constant uint& K [[buffer(11)]],
    constant uint& N [[buffer(12)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 at [[thread_position_in_threadgroup]]) {
  threadgroup float a[TILE][TILE], a_low[TILE][TILE];
  threadgroup float b[TILE][TILE], b_low[TILE][TILE];
  const uint row = group.y * TILE + at.y;
  const uint column = group.x * TILE + at.x;
  const bool is_inside = row < M && column < N;
  const ulong matrix = group.z;
  const ulong place = (matrix * M + row) * N + column;
  A += (matrix * M + row) * K;
  A_low += (matrix * M + row) * K;
  B += matrix * K * N + column;
  B_low += matrix * K * N + column;
  two_floats sum = {0.0f, 0.0f};
  three_floats rest = {0.0f, 0.0f, 0.0f};
  if (REST && is_inside) {
    const three_floats start = {C[place], C_low[place], 0.0f};
    rest = with_products(start, {-1.0f, 0.0f}, {D[place], D_low[place]});
  }
  for (uint first = 0; first < K; first += TILE) {
    const bool has_a = row < M && first + at.x < K;
    const bool has_b = column < N && first + at.y < K;
    const uint of_a = first + at.x;
    const ulong of_b = ulong(first + at.y) * N;
    a[at.y][at.x] = has_a ? A[of_a] : 0.0f;
    a_low[at.y][at.x] = has_a ? A_low[of_a] : 0.0f;
    b[at.y][at.x] = has_b ? B[of_b] : 0.0f;
    b_low[at.y][at.x] = has_b ? B_low[of_b] : 0.0f;
    // both tiles are there
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint k = 0; k < TILE; ++k) {
      const two_floats x = {a[at.y][k], a_low[at.y][k]};
      const two_floats y = {b[k][at.x], b_low[k][at.x]};
      if (REST) {
        rest = with_products(rest, negative(x), y);
      } else {
        const two_floats product = two_product(x.high, y.high);
        const two_floats next = two_sum(sum.high, product.high);
        const float low = fma(x.high, y.low, fma(x.low, y.high, product.low));
        sum = {next.high, sum.low + (next.low + low)};
      }
    }
    if (!REST && isfinite(sum.low)) {
      sum = quick_two_sum(sum.high, sum.low);
    }
    // every thread is done with the tiles
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (is_inside) {
    const two_floats found = REST ? rounded(rest) : sum;
    Y[place] = found.high;
    Y_low[place] = isfinite(found.low) ? found.low : 0.0f;
  }
}
