// SPDX-License-Identifier: MIT
// op(A) X = B for triangular A of n <= 64 rows, op(A) being A or its transpose; X may be B.
//
// trsm_rows: few right sides (k <= 16), whose rows stand in lanes. A matrix takes WIDTH lanes of a
// simdgroup, which passes solved rows on by shuffles. trsm_columns: each thread takes a right side.
// A, B and X are blocks of larger matrices: offset of the first element, elements from one row and
// from one matrix to the next. Systems of more than 64 rows are solved by blocks.

#include "triangular.h"

// Threadgroup memory: A is stored in rows of WIDTH + 1, so that lanes that read a column each use a
// bank of their own. 4224 = 4 * 32 * 33.
template <int WIDTH, int KEEP>
kernel void trsm_rows(
    device const float* A [[buffer(0)]],
    device const float* B [[buffer(1)]],
    device float* X [[buffer(2)]],
    constant long& systems [[buffer(3)]],
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
    ushort thread_lane [[thread_index_in_simdgroup]]) {
  constexpr int SHARE = 32 / WIDTH;
  constexpr int ROWS = WIDTH * KEEP;
  constexpr int LD = ROWS + 1;
  threadgroup float a_tile[4224];
  threadgroup float x_tile[2048];
  const long first = (long(group) * simdgroups + simdgroup) * SHARE;
  const int count = int(min(systems - first, long(SHARE)));
  if (count <= 0) {
    return;
  }
  const int rows = int(n);
  const int columns = int(k);
  const int values = rows * columns;
  threadgroup float* a = a_tile + simdgroup * SHARE * ROWS * LD;
  threadgroup float* x = x_tile + simdgroup * SHARE * ROWS * 16;
  for (int m = 0; m < count; ++m) {
    load_square(
        A + a_offset + (first + m) * a_matrix, a_row, rows, LD, thread_lane, 32, a + m * ROWS * LD);
  }
  // the right sides of a matrix are contiguous
  for (int e = thread_lane; e < count * values; e += 32) {
    const int m = e / values;
    x[e] = B[x_offset + (first + m) * x_matrix + e - m * values];
  }
  // each lane now reads what others stored
  simdgroup_barrier(mem_flags::mem_threadgroup);

  // lanes without a matrix solve zeros with the last one, and store nothing
  const int m = min(int(thread_lane) / WIDTH, count - 1);
  const bool owns = int(thread_lane) / WIDTH < count;
  const ushort lane = thread_lane % WIDTH;
  const bool forward = (lower != 0) != (transpose != 0);
  const substitution s = substitute(rows, LD, lower != 0, transpose != 0, unit != 0);
  a += m * ROWS * LD;
  x += m * values;
  float diagonal[KEEP];
  for (int r = 0; r < KEEP; ++r) {
    const int i = r * WIDTH + lane;
    diagonal[r] = i < rows ? a[s.first + i * (s.row + s.column)] : 1.0f;
  }
  for (int c = 0; c < columns; ++c) {
    float kept[KEEP];
    for (int r = 0; r < KEEP; ++r) {
      const int i = r * WIDTH + lane;
      kept[r] = owns && i < rows ? x[row_of(i, rows, forward) * columns + c] : 0.0f;
    }
    solve_in_lanes<WIDTH, KEEP>(a, s, rows, thread_lane - lane, lane, diagonal, kept);
    for (int r = 0; r < KEEP; ++r) {
      const int i = r * WIDTH + lane;
      if (owns && i < rows) {
        x[row_of(i, rows, forward) * columns + c] = kept[r];
      }
    }
  }
  // each lane now writes out what others stored
  simdgroup_barrier(mem_flags::mem_threadgroup);
  x -= m * values;
  for (int e = thread_lane; e < count * values; e += 32) {
    const int m = e / values;
    X[x_offset + (first + m) * x_matrix + e - m * values] = x[e];
  }
}

// The threads of a threadgroup share a matrix, and each takes a right side.
template <int ROWS>
kernel void trsm_columns(
    device const float* A [[buffer(0)]],
    device const float* B [[buffer(1)]],
    device float* X [[buffer(2)]],
    constant long& n [[buffer(3)]],
    constant long& k [[buffer(4)]],
    constant long& a_offset [[buffer(5)]],
    constant long& a_row [[buffer(6)]],
    constant long& a_matrix [[buffer(7)]],
    constant long& x_offset [[buffer(8)]],
    constant long& x_matrix [[buffer(9)]],
    constant long& lower [[buffer(10)]],
    constant long& transpose [[buffer(11)]],
    constant long& unit [[buffer(12)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint2 thread_index [[thread_position_in_threadgroup]],
    uint2 threads [[threads_per_threadgroup]]) {
  threadgroup float a[4096];
  const int rows = int(n);
  load_square(A + a_offset + group.y * a_matrix, a_row, rows, rows, thread_index.x, threads.x, a);
  // all of A is there
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const long c = long(group.x) * threads.x + thread_index.x;
  if (c >= k) {
    return;
  }
  const bool forward = (lower != 0) != (transpose != 0);
  const long start = x_offset + group.y * x_matrix + c;
  float x[ROWS];
  for (int i = 0; i < ROWS; ++i) {
    x[i] = i < rows ? B[start + row_of(i, rows, forward) * k] : 0.0f;
  }
  solve_in_thread<ROWS>(a, substitute(rows, rows, lower != 0, transpose != 0, unit != 0), rows, x);
  for (int i = 0; i < ROWS; ++i) {
    if (i < rows) {
      X[start + row_of(i, rows, forward) * k] = x[i];
    }
  }
}

#define INSTANTIATE_ROWS(WIDTH, KEEP)                              \
  template [[host_name("trsm_rows_" #WIDTH "x" #KEEP)]] [[kernel]] \
  decltype(trsm_rows<WIDTH, KEEP>) trsm_rows<WIDTH, KEEP>;

INSTANTIATE_ROWS(8, 1)
INSTANTIATE_ROWS(16, 1)
INSTANTIATE_ROWS(32, 1)
INSTANTIATE_ROWS(32, 2)

#define INSTANTIATE_COLUMNS(ROWS)                          \
  template [[host_name("trsm_columns_" #ROWS)]] [[kernel]] \
  decltype(trsm_columns<ROWS>) trsm_columns<ROWS>;

INSTANTIATE_COLUMNS(16)
INSTANTIATE_COLUMNS(32)
INSTANTIATE_COLUMNS(64)
