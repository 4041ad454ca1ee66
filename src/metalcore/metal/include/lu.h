// SPDX-License-Identifier: MIT
// P A = L U with partial pivoting. Rows stay where they are, one per lane or thread, and know their
// position: that of step p is the pivot row of step p. Positions change as LAPACK swaps rows.
#pragma once

#include <metal_stdlib>
using namespace metal;

// The size of x as pivots are chosen by it: a NaN counts as zero, a row that is done as less.
inline float pivot_size(float x, bool open) {
  return open ? (fabs(x) >= 0.0f ? fabs(x) : 0.0f) : -1.0f;
}

// x over the pivot, for all x that are not larger: where the pivot is zero, x is zero or NaN.
inline float multiplier(float x, float pivot) { return pivot == 0.0f ? x : x / pivot; }

// Over the WIDTH lanes that hold a matrix.
template <int WIDTH>
inline float largest_of(float x) {
  for (ushort d = WIDTH / 2; d > 0; d /= 2) {
    x = max(x, simd_shuffle_xor(x, d));
  }
  return x;
}

template <int WIDTH>
inline int smallest_of(int x) {
  for (ushort d = WIDTH / 2; d > 0; d /= 2) {
    x = min(x, simd_shuffle_xor(x, d));
  }
  return x;
}

// The lane of the one row for which `here` holds, among the WIDTH lanes from `base` on.
template <int WIDTH>
inline ushort lane_where(bool here, ushort base) {
  const uint votes = uint(ulong(simd_ballot(here))) >> base;
  return base + ushort(ctz(WIDTH == 32 ? votes : votes & ((1u << WIDTH % 32) - 1)));
}

// `count` matrices [m, n] that follow each other, rows `step` apart, into a tile for the lanes of a
// simdgroup: LD values for each lane.
template <int WIDTH, int LD>
inline void load_rows(
    device const float* from,
    uint m,
    uint n,
    uint step,
    uint count,
    uint lane,
    threadgroup float* tile) {
  for (uint e = lane; e < count * m * n; e += 32) {
    const uint r = e / n;
    tile[(r / m * WIDTH + r % m) * LD + e % n] = from[r * step + e % n];
  }
}

// The row of a matrix [m, n] in a lane while it is factored. Each step takes its first value off
// the registers, so that they have the same place in all, and to `done`.
template <int WIDTH>
struct factored_row {
  threadgroup float* done;
  int m;
  ushort base;
  int position;
  int info;

  // Steps first..last, the columns from `first` on in `a`.
  template <int LENGTH>
  void eliminate(thread float* a, int first, int last) thread {
    for (int p = first; p < last; ++p) {
      const bool open = position >= p && position < m;
      const float size = pivot_size(a[0], open);
      const bool is_largest = size == largest_of<WIDTH>(size);
      const int q = smallest_of<WIDTH>(is_largest ? position : WIDTH);
      const ushort from = lane_where<WIDTH>(position == q, base);
      position = position == q ? p : position == p ? q : position;

      const float pivot = simd_shuffle(a[0], from);
      info = info == 0 && pivot == 0.0f ? p + 1 : info;
      const bool below = position > p && position < m;
      const float l = multiplier(a[0], pivot);
      done[p] = below ? l : a[0];
#pragma unroll
      for (int j = 1; j < LENGTH; ++j) {
        const float u = simd_shuffle(a[j], from);
        a[j - 1] = below ? a[j] - l * u : a[j];
      }
      a[LENGTH - 1] = 0.0f;
    }
  }

  // The columns first..n, after all steps.
  template <int LENGTH>
  void put_rest(thread const float* a, int first, int n) thread {
#pragma unroll
    for (int j = 0; j < LENGTH; ++j) {
      if (first + j < n) {
        done[first + j] = a[j];
      }
    }
  }
};

// Factors [m, n] with m, n <= WIDTH; row `row` stands in `done`, in the lane base + row. Then
// `done` has its values of L, left of the position, and of U. info is 0, or 1 + the first step
// whose pivot is zero.
template <int WIDTH>
inline factored_row<WIDTH> factor_in_lanes(
    threadgroup float* done, bool mine, int m, int n, int row, ushort base) {
  float a[WIDTH];
#pragma unroll
  for (int j = 0; j < WIDTH; ++j) {
    a[j] = mine && j < n ? done[j] : 0.0f;
  }
  const int steps = min(m, n);
  factored_row<WIDTH> own = {done, m, base, row, 0};
  own.template eliminate<WIDTH>(a, 0, min(steps, WIDTH / 2));
  if (steps <= WIDTH / 2) {
    own.template put_rest<WIDTH>(a, steps, n);
  } else {
    own.template eliminate<WIDTH / 2>(a, WIDTH / 2, steps);
    own.template put_rest<WIDTH / 2>(a, steps, n);
  }
  return own;
}

// Factors [m, n] with m, n <= 64 in threadgroup memory, rows 65 values apart, by 64 threads: one
// for each row. `found` and `place` hold four values each. One barrier for each step.
inline void factor_in_threadgroup(
    threadgroup float* a,
    threadgroup float* found,
    threadgroup int* place,
    int m,
    int n,
    int row,
    thread int& position,
    thread int& info) {
  threadgroup float* own = a + row * 65;
  position = row;
  info = 0;
  for (int p = 0; p < min(m, n); ++p) {
    const bool open = position >= p && position < m;
    const float size = pivot_size(open ? own[p] : 0.0f, open);
    const float largest = simd_max(size);
    const int first = simd_min(size == largest ? position * 64 + row : 64 * 64);
    // two halves in turn: the barrier of one step guards the half that the next uses
    threadgroup float* sizes = found + p % 2 * 2;
    threadgroup int* places = place + p % 2 * 2;
    if (row % 32 == 0) {
      sizes[row / 32] = largest;
      places[row / 32] = first;
    }
    // candidates of both simdgroups are there, and rows as the step before left them
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int nearer = sizes[0] > sizes[1] ? places[0] : places[1];
    const int q = sizes[0] == sizes[1] ? min(places[0], places[1]) : nearer;
    threadgroup const float* top = a + q % 64 * 65;
    position = position == q / 64 ? p : position == p ? q / 64 : position;

    const float pivot = top[p];
    info = info == 0 && pivot == 0.0f ? p + 1 : info;
    if (position > p && position < m) {
      const float l = multiplier(own[p], pivot);
      own[p] = l;
      for (int j = p + 1; j < n; ++j) {
        own[j] -= l * top[j];
      }
    }
  }
}
