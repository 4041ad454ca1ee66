// SPDX-License-Identifier: MIT
// What kernels of the mLSTM share: matrices of a chunk, tiles of them, and weights of its steps.
//
// Values have a column of ones behind them, and their gradients that of l, so that n is a column of
// C. w and c are sums of two floats: the weight of step j in step t is exp(w_j - c_t).
#pragma once

#include <metal_simdgroup_matrix>

#include "attention.h"

// The sizes of a call, in the order of the argument.
struct mlstm_sizes {
  constant long* size;

  int steps() const { return int(size[0]); }
  int head() const { return int(size[1]); }
  int values() const { return int(size[2]); }
  uint heads() const { return uint(size[3]); }
  // Of the states before and after the chunks of a head: room for so many.
  uint slots() const { return uint(size[4]); }
  uint sequences() const { return uint(size[5]); }
  // Of a state: C and n side by side.
  ulong state() const { return ulong(size[1]) * ulong(size[2] + 1); }
};

// The steps of a sequence in one head, an entry of its own or PACKED with others in one entry.
struct mlstm_sequence {
  // Its initial state, its first step in [entries, heads, steps] and in [entries, steps, heads],
  // and the slot of its first state.
  ulong state;
  ulong first;
  ulong line;
  ulong slot;
  int steps;
  int chunks;
};

template <int STEPS, bool PACKED>
inline mlstm_sequence sequence_of(mlstm_sizes s, device const int* starts, uint n, uint head) {
  const uint start = PACKED ? uint(starts[n]) : 0;
  const int steps = PACKED ? starts[n + 1] - starts[n] : s.steps();
  const ulong entry = PACKED ? 0 : n;
  const ulong row = entry * s.heads() + head;
  return {
      ulong(n) * s.heads() + head,
      row * uint(s.steps()) + start,
      (entry * uint(s.steps()) + start) * s.heads() + head,
      row * s.slots() + (PACKED ? start / STEPS + 2 * n : 0),
      steps,
      (steps + STEPS - 1) / STEPS};
}

// The sequence of a slot, where sequence n has those from starts[n] / STEPS + gap * n on.
template <int STEPS>
inline uint sequence_at(mlstm_sizes s, device const int* starts, uint slot, uint gap) {
  uint low = 0;
  uint high = s.sequences();
  while (high - low > 1) {
    const uint middle = (low + high) / 2;
    const bool is_later = uint(starts[middle]) / STEPS + gap * middle > slot;
    low = is_later ? low : middle;
    high = is_later ? middle : high;
  }
  return low;
}

// Eight steps of a sequence: of which chunk, where that starts, and their first row in it.
struct mlstm_tile {
  mlstm_sequence of;
  int chunk;
  int start;
  int row;

  // The chunk's first step in [entries, heads, steps], and a step's line in [entries, steps, heads]
  ulong from() const { return of.first + uint(start); }
  ulong line(mlstm_sizes s, int t) const { return of.line + ulong(start + t) * s.heads(); }
};

template <int STEPS, bool PACKED>
inline mlstm_tile tile_at(mlstm_sizes s, device const int* starts, uint tile, uint head) {
  const uint slot = tile / (STEPS / 8);
  const int row = int(tile % (STEPS / 8)) * 8;
  // the last chunk of a sequence may be short: one more than there are whole ones
  const uint n = PACKED ? sequence_at<STEPS>(s, starts, slot, 1) : head / s.heads();
  const int chunk = int(PACKED ? slot - (uint(starts[n]) / STEPS + n) : slot);
  return {
      sequence_of<STEPS, PACKED>(s, starts, n, PACKED ? head : head % s.heads()), chunk,
      chunk * STEPS, row};
}

// Rows of a chunk, from those of all steps [steps, columns]; zeros outside.
template <typename T>
struct chunk_rows {
  device const T* x;
  int rows;
  int columns;

  float at(int row, int column) const {
    return row < rows && column < columns ? float(x[ulong(row) * uint(columns) + uint(column)])
                                          : 0.0f;
  }
};

template <typename T>
struct values_and_ones {
  chunk_rows<T> v;

  float at(int row, int column) const {
    return column == v.columns && row < v.rows ? 1.0f : v.at(row, column);
  }
};

// u = dh / R, and dl.
template <typename T>
struct shared_gradients {
  chunk_rows<T> dh;
  device const float* share;
  device const float* dl;

  float at(int row, int column) const {
    if (row >= dh.rows) {
      return 0.0f;
    }
    return column == dh.columns ? dl[row] : dh.at(row, column) * share[row];
  }
};

template <typename M>
inline simdgroup_float8x8 tile_of(M m, int row, int column, uint2 place) {
  simdgroup_float8x8 tile;
  tile.thread_elements()[0] = m.at(row + int(place.y), column + int(place.x));
  tile.thread_elements()[1] = m.at(row + int(place.y), column + int(place.x) + 1);
  return tile;
}

template <typename M>
inline simdgroup_float8x8 turned_tile_of(M m, int row, int column, uint2 place) {
  simdgroup_float8x8 tile;
  tile.thread_elements()[0] = m.at(row + int(place.x), column + int(place.y));
  tile.thread_elements()[1] = m.at(row + int(place.x) + 1, column + int(place.y));
  return tile;
}

inline float weight_of(float2 w, float2 c) { return precise::exp((w.x - c.x) + (w.y - c.y)); }

// The gates of a chunk of a head.
struct chunk_gates {
  device const float2* w;
  device const float2* c;
  float2 before;
  float2 last;
  int count;

  // Of the state before the chunk in step t, and of step j in the state after it.
  float from_start(int t) const { return t < count ? weight_of(before, c[t]) : 0.0f; }
  float to_end(int j) const { return j < count ? weight_of(w[j], last) : 0.0f; }
  float kept() const { return weight_of(before, last); }
};

inline chunk_gates gates_of(
    device const float2* w, device const float2* c, float m0, int start, int count) {
  const float2 before = start == 0 ? float2(m0, 0.0f) : c[start - 1];
  return {w + start, c + start, before, c[start + count - 1], count};
}

// pairs[x] = (X Y^T) of eight rows and TILES * 8 columns, times their weights and root: of earlier
// steps in these rows (LOWER), or of these rows in later ones.
template <bool LOWER, int TILES, typename X, typename Y>
inline void weigh_pairs(
    thread simdgroup_float8x8* pairs,
    X x,
    Y y,
    int depth,
    int row,
    chunk_gates gates,
    float root,
    uint2 place) {
#pragma unroll
  for (int p = 0; p < TILES; ++p) {
    pairs[p] = simdgroup_float8x8(0.0f);
  }
  for (int d = 0; d < depth; d += 8) {
    const simdgroup_float8x8 a = tile_of(x, row, d, place);
#pragma unroll
    for (int p = 0; p < TILES; ++p) {
      if (LOWER ? p * 8 <= row : p * 8 >= row && p * 8 < gates.count) {
        const simdgroup_float8x8 b = turned_tile_of(y, p * 8, d, place);
        simdgroup_multiply_accumulate(pairs[p], a, b, pairs[p]);
      }
    }
  }
  const int own = row + int(place.y);
#pragma unroll
  for (int p = 0; p < TILES; ++p) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int other = p * 8 + int(place.x) + e;
      const int j = LOWER ? other : own;
      const int t = LOWER ? own : other;
      const bool is_pair = j <= t && t < gates.count;
      const float weight = is_pair ? weight_of(gates.w[j], gates.c[t]) * root : 0.0f;
      pairs[p].thread_elements()[e] = is_pair ? pairs[p].thread_elements()[e] * weight : 0.0f;
    }
  }
}
