// SPDX-License-Identifier: MIT
// Where the parts of attention's tensors lie: sizes, strides, and packed sequences.
#pragma once

#include <metal_stdlib>
using namespace metal;

// A sequence, and the tile of it that a threadgroup takes: -1 for none.
struct sequence {
  int tile;
  int first_query;
  int queries;
  int first_key;
  int keys;
};

struct attention_sizes {
  constant long* size;
  constant long* stride;

  uint heads() const { return uint(size[0]); }
  uint heads_per_key() const { return uint(size[1]); }
  int queries() const { return int(size[2]); }
  int keys() const { return int(size[3]); }
  uint head_size() const { return uint(size[4]); }
  uint value_size() const { return uint(size[5]); }
  int left() const { return int(size[6]); }
  int right() const { return int(size[7]); }
  uint sequences() const { return uint(size[8]); }

  uint q_row() const { return uint(stride[2]); }
  uint k_row() const { return uint(stride[5]); }
  uint v_row() const { return uint(stride[8]); }
  ulong mask_query() const { return ulong(stride[11]); }
  ulong mask_key() const { return ulong(stride[12]); }
  ulong slope(uint entry, uint head) const { return entry * ulong(stride[13]) + head; }

  ulong q_start(uint entry, uint head, sequence at) const {
    return start(0, entry, head, at.first_query);
  }
  ulong k_start(uint entry, uint head, sequence at) const {
    return start(3, entry, head / heads_per_key(), at.first_key);
  }
  ulong v_start(uint entry, uint head, sequence at) const {
    return start(6, entry, head / heads_per_key(), at.first_key);
  }
  ulong mask_start(uint entry, uint head, sequence at) const {
    return entry * ulong(stride[9]) + head * ulong(stride[10]) +
           ulong(at.first_query) * mask_query() + ulong(at.first_key) * mask_key();
  }
  // of out, in memory [entries, queries, heads, value_size]
  ulong out_start(uint entry, uint head, sequence at, int query) const {
    const ulong row = ulong(entry) * queries() + at.first_query + query;
    return (row * heads() + head) * value_size();
  }
  // of lse and delta, [entries, heads, queries]
  ulong lse_start(uint entry, uint head, sequence at) const {
    return (ulong(entry) * heads() + head) * queries() + at.first_query;
  }
  ulong start(uint from, uint entry, uint head, int row) const {
    return entry * ulong(stride[from]) + head * ulong(stride[from + 1]) +
           ulong(row) * ulong(stride[from + 2]);
  }
};

// The sequence that tile number `tile` is of, each of them in tiles of ROWS queries or keys.
template <bool PACKED, int ROWS>
inline sequence find_sequence(
    attention_sizes s,
    device const int* starts_q,
    device const int* starts_k,
    uint tile,
    bool by_keys = false) {
  if (!PACKED) {
    return sequence{int(tile), 0, s.queries(), 0, s.keys()};
  }
  for (uint n = 0; n < s.sequences(); ++n) {
    const int queries = starts_q[n + 1] - starts_q[n];
    const int keys = starts_k[n + 1] - starts_k[n];
    const uint tiles = uint((by_keys ? keys : queries) + ROWS - 1) / ROWS;
    if (tile < tiles) {
      return sequence{int(tile), starts_q[n], queries, starts_k[n], keys};
    }
    tile -= tiles;
  }
  return sequence{-1, 0, 0, 0, 0};
}

// Whether it holds for all threads of a group. One barrier, after which what they wrote before is
// there; `each` may be used again after another one.
template <int SIMDGROUPS>
inline bool all_of_group(bool mine, threadgroup int* each, uint simdgroup, uint lane) {
  const bool ours = simd_all(mine);
  if (lane == 0) {
    each[simdgroup] = ours;
  }
  // all answers, and what was staged, are there
  threadgroup_barrier(mem_flags::mem_threadgroup);
  bool all = true;
  for (int i = 0; i < SIMDGROUPS; ++i) {
    all = all && each[i] != 0;
  }
  return all;
}
