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
  uint count;
  uint order;
  int n;
  int k;

  // where matrix m, and its right sides, start
  ulong matrix(uint m) const thread { return ulong(m) * (order * order); }
  ulong sides(uint m) const thread { return ulong(m) * (order * uint(k)); }
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
    uint simdgroup_in_grid,
    uint simdgroup,
    ushort thread_lane,
    threadgroup float* a_tile,
    threadgroup float* x_tile) {
  constexpr int SHARE = 32 / WIDTH;
  constexpr int ROWS = WIDTH * KEEP;
  // an odd length, so that lanes that read a column each use a bank of their own
  constexpr int LD = ROWS + 1;
  const uint first = simdgroup_in_grid * SHARE;
  if (first >= all.count) {
    return;
  }
  const int count = min(all.count - first, uint(SHARE));
  const int n = all.n;
  const int values = n * all.k;
  threadgroup float* a = a_tile + simdgroup * SHARE * ROWS * LD;
  threadgroup float* x = x_tile + simdgroup * SHARE * ROWS * RIGHT;
  for (int m = 0; m < count; ++m) {
    device const float* from = all.A + all.matrix(first + m);
    load_square(from, all.order, n, LD, thread_lane, 32, a + m * ROWS * LD);
  }
  // the right sides of a matrix are contiguous
  for (int e = thread_lane; e < count * values; e += 32) {
    const int m = e / values;
    x[e] = all.B[all.sides(first + m) + e - m * values];
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
    all.X[all.sides(first + m) + e - m * values] = x[e];
  }
}

// One right side: rows as substitution counts them, of a matrix padded to `size` rows.
struct right_side {
  uint k;
  int n;
  int size;
  bool forward;

  int row(int i) const thread { return row_of(i, size, forward); }
  uint at(int i) const thread { return uint(row(i)) * k; }
};

template <int ROWS>
inline void load_rows(device const float* B, right_side c, int first, int rows, thread float* x) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    x[i] = i < rows && c.row(first + i) < c.n ? B[c.at(first + i)] : 0.0f;
  }
}

// As solve_in_thread leaves them: the last `rows` of x.
template <int ROWS>
inline void store_rows(device float* X, right_side c, int first, int rows, thread const float* x) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int at = first + i - (ROWS - rows);
    if (at >= first && c.row(at) < c.n) {
      X[c.at(at)] = x[i];
    }
  }
}

// Rows first .. first + rows, after those before, which are in X.
template <int ROWS>
inline void solve_rows(
    threadgroup const float* a,
    substitution s,
    device const float* X,
    right_side c,
    int first,
    int rows,
    thread float* x) {
  const substitution own = from_row(s, first);
  for (int j = 0; j < first; ++j) {
    const float solved = c.row(j) < c.n ? X[c.at(j)] : 0.0f;
    threadgroup const float* factors = a + own.first + (j - first) * s.column;
#pragma unroll
    for (int next = 0; next < ROWS; next += kStep) {
      if (next < rows) {
#pragma unroll
        for (int i = next; i < next + kStep; ++i) {
          x[i] -= factors[i * s.row] * solved;
        }
      }
    }
  }
  solve_in_thread<ROWS>(a, own, rows, x);
}

// The threads of a threadgroup share a matrix of n <= BLOCK rows, and each takes a right side, ROWS
// rows of it at a time in registers. `a` has BLOCK^2 values.
template <int BLOCK>
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
  constexpr int ROWS = BLOCK < 32 ? BLOCK : 32;
  device const float* from = all.A + all.matrix(group.y);
  load_padded(from, all.order, all.n, BLOCK, thread_index, threads, a);
  // all of A is there
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const uint column = group.x * threads + thread_index;
  if (column >= uint(all.k)) {
    return;
  }
  const int size = padded(all.n);
  const int last = (size - 1) / ROWS * ROWS;
  device const float* B = all.B + all.sides(group.y) + column;
  device float* X = all.X + all.sides(group.y) + column;
  const right_side c = {uint(all.k), all.n, size, lower != transpose};
  const substitution s = substitute(size, BLOCK, lower, transpose, unit);
  float x[ROWS];
  for (int first = 0; first < size; first += ROWS) {
    const int rows = min(ROWS, size - first);
    load_rows<ROWS>(B, c, first, rows, x);
    solve_rows<ROWS>(a, s, X, c, first, rows, x);
    if (passes == 1 || first < last) {
      store_rows<ROWS>(X, c, first, rows, x);
    }
  }
  if (passes == 1) {
    return;
  }
  // the last rows are still in registers, and the first now
#pragma unroll
  for (int i = 0; i < ROWS / 2; ++i) {
    const float other = x[ROWS - 1 - i];
    x[ROWS - 1 - i] = x[i];
    x[i] = other;
  }
  const right_side back = {uint(all.k), all.n, size, lower == transpose};
  const substitution turned = substitute(size, BLOCK, lower, !transpose, unit);
  int rows = size - last;
  for (int first = 0; first < size; first += rows) {
    if (first > 0) {
      rows = ROWS;
      load_rows<ROWS>(X, back, first, rows, x);
    }
    solve_rows<ROWS>(a, turned, X, back, first, rows, x);
    store_rows<ROWS>(X, back, first, rows, x);
  }
}
