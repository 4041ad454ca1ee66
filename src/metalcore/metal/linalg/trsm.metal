// SPDX-License-Identifier: MIT
// op(A) X = B for rows start .. start + n of triangular A [order, order], n <= BLOCK, with op(A)
// being A or its transpose, and A as if no other rows were there. X may be B.
//
// trsm_rows: few right sides (k <= RIGHT), whose rows stand in lanes, WIDTH KEEP >= n of them.
// trsm_columns: each thread takes a right side, up to 32 of its rows at a time.

#include "systems.h"

template <int WIDTH, int KEEP, int RIGHT, int SIMDGROUPS, bool LOWER, bool TRANSPOSE, bool UNIT>
[[max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] kernel void trsm_rows(
    device const float* A [[buffer(0)]],
    device const float* B [[buffer(1)]],
    device float* X [[buffer(2)]],
    constant uint& count [[buffer(3)]],
    constant uint& order [[buffer(4)]],
    constant uint& k [[buffer(5)]],
    constant uint& start [[buffer(6)]],
    constant uint& n [[buffer(7)]],
    uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float a_tile[SIMDGROUPS * 32 * KEEP * (WIDTH * KEEP + 1)];
  threadgroup float x_tile[SIMDGROUPS * 32 * KEEP * RIGHT];
  const uint first = start * k;
  const systems all = {A + start * (order + 1), B + first, X + first, count, order, int(n), int(k)};
  solve_systems_by_rows<WIDTH, KEEP, RIGHT>(
      all, LOWER, TRANSPOSE, UNIT, 1, group * SIMDGROUPS + simdgroup, simdgroup, lane, a_tile,
      x_tile);
}

template <int BLOCK, bool LOWER, bool TRANSPOSE, bool UNIT>
[[max_total_threads_per_threadgroup(128)]] kernel void trsm_columns(
    device const float* A [[buffer(0)]],
    device const float* B [[buffer(1)]],
    device float* X [[buffer(2)]],
    constant uint& count [[buffer(3)]],
    constant uint& order [[buffer(4)]],
    constant uint& k [[buffer(5)]],
    constant uint& start [[buffer(6)]],
    constant uint& n [[buffer(7)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint2 thread_index [[thread_position_in_threadgroup]],
    uint2 threads [[threads_per_threadgroup]]) {
  threadgroup float a_tile[BLOCK * BLOCK];
  const uint first = start * k;
  const systems all = {A + start * (order + 1), B + first, X + first, count, order, int(n), int(k)};
  solve_systems_by_columns<BLOCK>(
      all, LOWER, TRANSPOSE, UNIT, 1, group, thread_index.x, threads.x, a_tile);
}
