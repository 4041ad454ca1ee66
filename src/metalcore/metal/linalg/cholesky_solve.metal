// SPDX-License-Identifier: MIT
// L L^T X = B for n <= 64 rows; with `transpose`, L^T L X = B. L is read once.
//
// cholesky_solve_rows: few right sides (k <= 16), whose rows stand in lanes.
// cholesky_solve_columns: each thread takes a right side. Larger systems take two rounds of trsm.

#include "systems.h"

template <int WIDTH, int KEEP>
kernel void cholesky_solve_rows(
    device const float* A [[buffer(0)]],
    device const float* B [[buffer(1)]],
    device float* X [[buffer(2)]],
    constant long& systems_in_all [[buffer(3)]],
    constant long& n [[buffer(4)]],
    constant long& k [[buffer(5)]],
    constant long& a_offset [[buffer(6)]],
    constant long& a_row [[buffer(7)]],
    constant long& a_matrix [[buffer(8)]],
    constant long& x_offset [[buffer(9)]],
    constant long& x_matrix [[buffer(10)]],
    constant long& lower [[buffer(11)]],
    constant long& transpose [[buffer(12)]],
    constant long& unit [[buffer(13)]],
    uint group [[threadgroup_position_in_grid]],
    uint simdgroups [[simdgroups_per_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float a_tile[4224];
  threadgroup float x_tile[2048];
  const systems all = {A + a_offset, B + x_offset, X + x_offset, systems_in_all, int(n),
                       int(k),       a_row,        a_matrix,     x_matrix};
  solve_systems_by_rows<WIDTH, KEEP>(
      all, lower != 0, transpose != 0, unit != 0, 2, long(group) * simdgroups + simdgroup,
      simdgroup, lane, a_tile, x_tile);
}

template <int ROWS>
kernel void cholesky_solve_columns(
    device const float* A [[buffer(0)]],
    device const float* B [[buffer(1)]],
    device float* X [[buffer(2)]],
    constant long& systems_in_all [[buffer(3)]],
    constant long& n [[buffer(4)]],
    constant long& k [[buffer(5)]],
    constant long& a_offset [[buffer(6)]],
    constant long& a_row [[buffer(7)]],
    constant long& a_matrix [[buffer(8)]],
    constant long& x_offset [[buffer(9)]],
    constant long& x_matrix [[buffer(10)]],
    constant long& lower [[buffer(11)]],
    constant long& transpose [[buffer(12)]],
    constant long& unit [[buffer(13)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint2 thread_index [[thread_position_in_threadgroup]],
    uint2 threads [[threads_per_threadgroup]]) {
  threadgroup float a_tile[4096];
  const systems all = {A + a_offset, B + x_offset, X + x_offset, systems_in_all, int(n),
                       int(k),       a_row,        a_matrix,     x_matrix};
  solve_systems_by_columns<ROWS>(
      all, lower != 0, transpose != 0, unit != 0, 2, group, thread_index.x, threads.x, a_tile);
}

#define INSTANTIATE_ROWS(WIDTH, KEEP)                                        \
  template [[host_name("cholesky_solve_rows_" #WIDTH "x" #KEEP)]] [[kernel]] \
  decltype(cholesky_solve_rows<WIDTH, KEEP>) cholesky_solve_rows<WIDTH, KEEP>;

INSTANTIATE_ROWS(8, 1)
INSTANTIATE_ROWS(16, 1)
INSTANTIATE_ROWS(32, 1)
INSTANTIATE_ROWS(32, 2)

#define INSTANTIATE_COLUMNS(ROWS)                                    \
  template [[host_name("cholesky_solve_columns_" #ROWS)]] [[kernel]] \
  decltype(cholesky_solve_columns<ROWS>) cholesky_solve_columns<ROWS>;

INSTANTIATE_COLUMNS(16)
INSTANTIATE_COLUMNS(32)
