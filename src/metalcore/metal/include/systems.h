// SPDX-License-Identifier: MIT
// Batches of triangular systems of up to 64 rows: one op(A) X = B, or that of the transpose after
// it.
#pragma once

#include "triangular.h"

// Blocks of n rows, A [n, n] on the diagonal and B and X [n, k], of `count` matrices of `order`
// rows each. The pointers are those of the first matrix. X may be B.
struct systems {
  device const float* A;
  device const float* B;
  device float* X;
  long count;
  long order;
  int n;
  int k;
};

// Few right sides, k <= RIGHT, with their rows in lanes: a matrix takes WIDTH lanes of a simdgroup,
// which passes solved rows on by shuffles. Solves with A, then with the transpose of that if
// `passes` is 2. For each simdgroup, `a_tile` has 32 KEEP (WIDTH KEEP + 1) values, and `x_tile`
// 32 KEEP RIGHT.
template <int WIDTH, int KEEP, int RIGHT>
inline void solve_systems_by_rows(
    systems all,
    bool lower,
    bool transpose,
    bool unit,
    int passes,
    long simdgroup_in_grid,
    uint simdgroup,
    ushort thread_lane,
    threadgroup float* a_tile,
    threadgroup float* x_tile) {
  constexpr int SHARE = 32 / WIDTH;
  constexpr int ROWS = WIDTH * KEEP;
  // an odd length, so that lanes that read a column each use a bank of their own
  constexpr int LD = ROWS + 1;
  const long first = simdgroup_in_grid * SHARE;
  const int count = int(min(all.count - first, long(SHARE)));
  if (count <= 0) {
    return;
  }
  const int n = all.n;
  const int values = n * all.k;
  threadgroup float* a = a_tile + simdgroup * SHARE * ROWS * LD;
  threadgroup float* x = x_tile + simdgroup * SHARE * ROWS * RIGHT;
  for (int m = 0; m < count; ++m) {
    device const float* from = all.A + (first + m) * all.order * all.order;
    load_square(from, all.order, n, LD, thread_lane, 32, a + m * ROWS * LD);
  }
  // the right sides of a matrix are contiguous
  for (int e = thread_lane; e < count * values; e += 32) {
    const int m = e / values;
    x[e] = all.B[(first + m) * all.order * all.k + e - m * values];
  }
  // each lane now reads what others stored
  simdgroup_barrier(mem_flags::mem_threadgroup);

  // lanes without a matrix solve zeros with the last one, and store nothing
  const int mine = min(int(thread_lane) / WIDTH, count - 1);
  const bool owns = int(thread_lane) / WIDTH < count;
  const ushort lane = thread_lane % WIDTH;
  a += mine * ROWS * LD;
  for (int pass = 0; pass < passes; ++pass) {
    const bool turned = transpose != (pass == 1);
    const bool forward = lower != turned;
    const substitution s = substitute(n, LD, lower, turned, unit);
    float diagonal[KEEP];
#pragma unroll
    for (int r = 0; r < KEEP; ++r) {
      const int i = r * WIDTH + lane;
      diagonal[r] = i < n ? a[s.first + i * (s.row + s.column)] : 1.0f;
    }
    for (int c = 0; c < all.k; ++c) {
      float kept[KEEP];
#pragma unroll
      for (int r = 0; r < KEEP; ++r) {
        const int i = r * WIDTH + lane;
        const int at = mine * values + row_of(i, n, forward) * all.k + c;
        kept[r] = owns && i < n ? x[at] : 0.0f;
      }
      solve_in_lanes<WIDTH, KEEP>(a, s, n, thread_lane - lane, lane, diagonal, kept);
#pragma unroll
      for (int r = 0; r < KEEP; ++r) {
        const int i = r * WIDTH + lane;
        if (owns && i < n) {
          x[mine * values + row_of(i, n, forward) * all.k + c] = kept[r];
        }
      }
    }
    // each lane now reads what others stored
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int e = thread_lane; e < count * values; e += 32) {
    const int m = e / values;
    all.X[(first + m) * all.order * all.k + e - m * values] = x[e];
  }
}

// One right side: element i of X as substitution counts rows is X[at(i)].
struct right_side {
  long start;
  long k;
  int n;
  bool forward;

  long at(int i) const thread { return start + long(row_of(i, n, forward)) * k; }
};

template <int ROWS>
inline void load_rows(device const float* B, right_side c, int first, int rows, thread float* x) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    x[i] = i < rows ? B[c.at(first + i)] : 0.0f;
  }
}

template <int ROWS>
inline void store_rows(device float* X, right_side c, int first, int rows, thread const float* x) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    if (i < rows) {
      X[c.at(first + i)] = x[i];
    }
  }
}

// What the solved row j takes from x: a points to its factor for the first row.
template <int ROWS>
inline void take_solved(
    threadgroup const float* a, int step, float solved, int rows, thread float* x) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    x[i] -= i < rows ? a[i * step] * solved : 0.0f;
  }
}

// The threads of a threadgroup share a matrix, and each takes a right side, ROWS rows of it at a
// time in registers. `a` has n^2 values.
template <int ROWS>
inline void solve_systems_by_columns(
    systems all,
    bool lower,
    bool transpose,
    bool unit,
    int passes,
    uint2 group,
    uint thread_index,
    uint threads,
    threadgroup float* a) {
  const int n = all.n;
  device const float* from = all.A + group.y * all.order * all.order;
  load_square(from, all.order, n, n, thread_index, threads, a);
  // all of A is there
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const long column = long(group.x) * threads + thread_index;
  if (column >= all.k) {
    return;
  }
  const long start = group.y * all.order * all.k + column;
  const right_side c = {start, all.k, n, lower != transpose};
  const substitution s = substitute(n, n, lower, transpose, unit);
  const int last = (n - 1) / ROWS * ROWS;
  float x[ROWS];
  for (int first = 0; first < n; first += ROWS) {
    const int rows = min(ROWS, n - first);
    load_rows<ROWS>(all.B, c, first, rows, x);
    for (int j = 0; j < first; ++j) {
      const int entry = s.first + first * s.row + j * s.column;
      take_solved<ROWS>(a + entry, s.row, all.X[c.at(j)], rows, x);
    }
    solve_in_thread<ROWS>(a, from_row(s, first), rows, x);
    if (passes == 1 || first < last) {
      store_rows<ROWS>(all.X, c, first, rows, x);
    }
  }
  // the last rows are still in registers
  for (int first = last; first >= 0 && passes == 2; first -= ROWS) {
    const int rows = min(ROWS, n - first);
    if (first < last) {
      load_rows<ROWS>(all.X, c, first, rows, x);
    }
    for (int j = first + rows; j < n; ++j) {
      const int entry = s.first + j * s.row + first * s.column;
      take_solved<ROWS>(a + entry, s.column, all.X[c.at(j)], rows, x);
    }
    solve_transposed_in_thread<ROWS>(a, from_row(s, first), rows, x);
    store_rows<ROWS>(all.X, c, first, rows, x);
  }
}
