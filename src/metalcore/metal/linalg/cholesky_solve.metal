// SPDX-License-Identifier: MIT
// L L^T X = B for n <= BLOCK rows, or U^T U X = B where the factor A is UPPER. A is read once.
//
// cholesky_solve_rows: few right sides (k <= RIGHT), whose rows stand in lanes.
// cholesky_solve_columns: each thread takes a right side. Larger systems take two rounds of trsm.

#include "systems.h"

template <int WIDTH, int KEEP, int RIGHT, int SIMDGROUPS, bool UPPER>
[[max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] kernel void cholesky_solve_rows(
    device const float* A [[buffer(0)]],
    device const float* B [[buffer(1)]],
    device float* X [[buffer(2)]],
    constant uint& count [[buffer(3)]],
    constant uint& n [[buffer(4)]],
    constant uint& k [[buffer(5)]],
    uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float a_tile[SIMDGROUPS * 32 * KEEP * (WIDTH * KEEP + 1)];
  threadgroup float x_tile[SIMDGROUPS * 32 * KEEP * RIGHT];
  const systems all = {A, B, X, count, n, int(n), int(k)};
  solve_systems_by_rows<WIDTH, KEEP, RIGHT>(
      all, !UPPER, UPPER, false, 2, group * SIMDGROUPS + simdgroup, simdgroup, lane, a_tile,
      x_tile);
}

template <int BLOCK, bool UPPER>
[[max_total_threads_per_threadgroup(128)]] kernel void cholesky_solve_columns(
    device const float* A [[buffer(0)]],
    device const float* B [[buffer(1)]],
    device float* X [[buffer(2)]],
    constant uint& count [[buffer(3)]],
    constant uint& n [[buffer(4)]],
    constant uint& k [[buffer(5)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint2 thread_index [[thread_position_in_threadgroup]],
    uint2 threads [[threads_per_threadgroup]]) {
  threadgroup float a_tile[BLOCK * BLOCK];
  const systems all = {A, B, X, count, n, int(n), int(k)};
  solve_systems_by_columns<BLOCK>(
      all, !UPPER, UPPER, false, 2, group, thread_index.x, threads.x, a_tile);
}
