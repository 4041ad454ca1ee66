// SPDX-License-Identifier: MIT
// Triangular systems op(A) X = B of up to 64 rows, A in threadgroup memory.
#pragma once

#include <metal_stdlib>
using namespace metal;

// op(A) as forward substitution reads it: element (i, j) at first + i * row + j * column. Back
// substitution is the same from the last row on, with negative strides.
struct substitution {
  int first;
  int row;
  int column;
  bool unit;
};

// A [n, n] with its rows `ld` apart.
inline substitution substitute(int n, int ld, bool lower, bool transpose, bool unit) {
  const int row = transpose ? 1 : ld;
  const int column = transpose ? ld : 1;
  if (lower != transpose) {
    return {0, row, column, unit};
  }
  return {(n - 1) * (ld + 1), -row, -column, unit};
}

// The same from row and column `first` on.
inline substitution from_row(substitution s, int first) {
  return {s.first + first * (s.row + s.column), s.row, s.column, s.unit};
}

// The n x n block at `from`, with its rows `step` apart, into rows of `ld`, by `threads` threads.
inline void load_square(
    device const float* from,
    long step,
    int n,
    int ld,
    int thread_index,
    int threads,
    threadgroup float* a) {
  for (int e = thread_index; e < n * n; e += threads) {
    const int i = e / n;
    a[i * ld + e - i * n] = from[i * step + e - i * n];
  }
}

// The other way: n x n values in rows of `ld`, to rows that are `step` apart.
inline void store_square(
    threadgroup const float* a,
    int ld,
    int n,
    long step,
    int thread_index,
    int threads,
    device float* to) {
  for (int e = thread_index; e < n * n; e += threads) {
    const int i = e / n;
    to[i * step + e - i * n] = a[i * ld + e - i * n];
  }
}

// Row i of X as forward substitution counts it.
inline int row_of(int i, int n, bool forward) { return forward ? i : n - 1 - i; }

// One right side whose rows stand in WIDTH lanes, KEEP in each: lane l holds rows l, l + WIDTH, ...
// of the system that starts in lane `base`, and the diagonal of A. No barrier.
template <int WIDTH, int KEEP>
inline void solve_in_lanes(
    threadgroup const float* a,
    substitution s,
    int n,
    ushort base,
    ushort lane,
    thread const float* diagonal,
    thread float* x) {
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const int last = min(WIDTH, n - k * WIDTH);
    for (int j = 0; j < last; ++j) {
      const float own = s.unit ? x[k] : x[k] / diagonal[k];
      const float solved = simd_shuffle(own, ushort(base + j));
#pragma unroll
      for (int r = k; r < KEEP; ++r) {
        const int i = r * WIDTH + lane;
        if (i > k * WIDTH + j && i < n) {
          x[r] -= a[s.first + i * s.row + (k * WIDTH + j) * s.column] * solved;
        }
      }
    }
    x[k] = s.unit ? x[k] : x[k] / diagonal[k];
  }
}

// One right side per thread, its n <= ROWS rows in registers.
template <int ROWS>
inline void solve_in_thread(threadgroup const float* a, substitution s, int n, thread float* x) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    if (i < n) {
      threadgroup const float* row = a + s.first + i * s.row;
      float sum = x[i];
#pragma unroll
      for (int j = 0; j < i; ++j) {
        sum -= row[j * s.column] * x[j];
      }
      x[i] = s.unit ? sum : sum / row[i * s.column];
    }
  }
}

// The same with the transpose of op(A), from the last row to the first.
template <int ROWS>
inline void solve_transposed_in_thread(
    threadgroup const float* a, substitution s, int n, thread float* x) {
#pragma unroll
  for (int i = ROWS - 1; i >= 0; --i) {
    if (i < n) {
      threadgroup const float* column = a + s.first + i * s.column;
      float sum = x[i];
#pragma unroll
      for (int j = i + 1; j < ROWS; ++j) {
        if (j < n) {
          sum -= column[j * s.row] * x[j];
        }
      }
      x[i] = s.unit ? sum : sum / column[i * s.row];
    }
  }
}
