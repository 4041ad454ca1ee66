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
    uint step,
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

// Rows that a thread solves in one step: matrices are padded to a multiple of it.
constant constexpr int kStep = 8;

inline int padded(int n) { return (n + kStep - 1) / kStep * kStep; }

// The same into `padded(n)` rows and columns, as if A went on as the identity.
inline void load_padded(
    device const float* from,
    uint step,
    int n,
    int ld,
    int thread_index,
    int threads,
    threadgroup float* a) {
  const int size = padded(n);
  for (int e = thread_index; e < size * size; e += threads) {
    const int i = e / size;
    const int j = e - i * size;
    const float beyond = i == j ? 1.0f : 0.0f;
    a[i * ld + j] = i < n && j < n ? from[i * step + j] : beyond;
  }
}

// The other way: n x n values in rows of `ld`, to rows that are `step` apart.
inline void store_square(
    threadgroup const float* a,
    int ld,
    int n,
    uint step,
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

// One right side per thread, its first `rows` of ROWS rows in registers; a multiple of kStep. Each
// step takes kStep rows off the front and puts them to the end, where all stand at last, so that
// registers have the same place in all.
template <int ROWS>
inline void solve_in_thread(threadgroup const float* a, substitution s, int rows, thread float* x) {
  for (int done = 0; done < rows; done += kStep) {
    threadgroup const float* corner = a + s.first + done * (s.row + s.column);
    float solved[kStep];
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      float sum = x[i];
#pragma unroll
      for (int j = 0; j < i; ++j) {
        sum -= corner[i * s.row + j * s.column] * solved[j];
      }
      solved[i] = s.unit ? sum : sum / corner[i * (s.row + s.column)];
    }
#pragma unroll
    for (int next = kStep; next < ROWS; next += kStep) {
      float taken[kStep] = {};
      if (done + next < rows) {
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
#pragma unroll
          for (int j = 0; j < kStep; ++j) {
            taken[i] += corner[(next + i) * s.row + j * s.column] * solved[j];
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        x[next - kStep + i] = x[next + i] - taken[i];
      }
    }
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      x[ROWS - kStep + i] = solved[i];
    }
  }
}
