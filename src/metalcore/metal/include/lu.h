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
  const uint votes = uint(ulong(simd_ballot(here)) >> base);
  return base + ushort(ctz(WIDTH == 32 ? votes : votes & ((1u << WIDTH % 32) - 1)));
}

// `count` matrices [m, n] that follow each other, rows `step` apart, into a tile for the lanes of a
// simdgroup: 33 values for each lane.
template <int WIDTH>
inline void load_rows(
    device const float* from,
    int m,
    int n,
    long step,
    int count,
    uint lane,
    threadgroup float* tile) {
  for (int e = lane; e < count * m * n; e += 32) {
    const int r = e / n;
    tile[(r / m * WIDTH + r % m) * 33 + e % n] = from[r * step + e % n];
  }
}

// Factors [m, n] with m, n <= WIDTH; row `row` stands in a, with zeros past its end, in the lane
// base + row. Then a has its values of L, left of the position, and of U. info is 0, or 1 + the
// first step whose pivot is zero.
template <int WIDTH>
inline void factor_in_lanes(
    thread float* a, int m, int n, int row, ushort base, thread int& position, thread int& info) {
  position = row;
  info = 0;
#pragma unroll
  for (int p = 0; p < WIDTH; ++p) {
    if (p < min(m, n)) {
      const bool open = position >= p && position < m;
      const float size = pivot_size(a[p], open);
      const bool is_largest = size == largest_of<WIDTH>(size);
      const int q = smallest_of<WIDTH>(is_largest ? position : WIDTH);
      const ushort from = lane_where<WIDTH>(position == q, base);
      position = position == q ? p : position == p ? q : position;

      const float pivot = simd_shuffle(a[p], from);
      info = info == 0 && pivot == 0.0f ? p + 1 : info;
      const bool below = position > p && position < m;
      const float l = multiplier(a[p], pivot);
      a[p] = below ? l : a[p];
#pragma unroll
      for (int j = p + 1; j < WIDTH; ++j) {
        const float u = simd_shuffle(a[j], from);
        a[j] = below ? a[j] - l * u : a[j];
      }
    }
  }
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
