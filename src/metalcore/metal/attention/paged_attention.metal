// SPDX-License-Identifier: MIT
// out = softmax(scale * q k^T, with masks) v over keys in pages of a cache [pages, page, Hk, D], in
// two phases where queries are few: parts of the keys, then their merge. Key t of sequence b is row
// t % page of page table[b][t / page]; with TOKENS the row table[starts_k[b] + t]. A page of -1 is
// not read, and nobody sees its keys.
//
// A threadgroup takes a part of the keys and 8 * SIMDGROUPS rows: queries of all heads that share
// the keys. `lengths` are those of the sequences, or with TOKENS where each starts.

#include "over_cache.h"

template <
    typename T,
    typename S,
    int D,
    int DV,
    int WIDTH,
    int SIMDGROUPS,
    int KEYS,
    bool TOKENS,
    bool PACKED,
    bool LEFT,
    bool CAP,
    bool ALIBI,
    bool SINKS,
    bool SCALES,
    bool WHOLE>
// mslsim: allow(code): tiles are multiplied in registers, which takes constant indices
[[max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] kernel void paged_attention(
    device const T* q [[buffer(0)]],
    device const S* k [[buffer(1)]],
    device const S* v [[buffer(2)]],
    device const float* k_scale [[buffer(3)]],
    device const float* v_scale [[buffer(4)]],
    device const int* table [[buffer(5)]],
    device const int* lengths [[buffer(6)]],
    device const int* starts_q [[buffer(7)]],
    device const float* slopes [[buffer(8)]],
    device const float* sinks [[buffer(9)]],
    device T* out [[buffer(10)]],
    device float* lse [[buffer(11)]],
    device float* parts [[buffer(12)]],
    device float* part_sums [[buffer(13)]],
    constant long* size [[buffer(14)]],
    constant long* stride [[buffer(15)]],
    constant float& scale [[buffer(16)]],
    constant float& cap [[buffer(17)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup T q_tile[SIMDGROUPS * 8 * D];
  threadgroup T kv_tile[KEYS * WIDTH];
  threadgroup int rows[KEYS];
  threadgroup float scales[2 * KEYS];
  threadgroup int is_finite[SIMDGROUPS];
  const cache_sizes s = {size, stride};
  const uint key_head = group.y;
  cached_sequence here = find_tile<SIMDGROUPS * 8, PACKED>(s, starts_q, group.z);
  if (here.tile < 0) {
    return;
  }
  const int first = TOKENS ? lengths[here.entry] : 0;
  here.keys = TOKENS ? lengths[here.entry + 1] - first : lengths[here.entry];
  here.keys = clamp(here.keys, 0, s.capacity());
  here.first_place = TOKENS ? uint(first) : here.entry * s.table_width();
  cached_tensors<T, S> x = {
      q + (PACKED ? ulong(here.first_query) * s.row(0) : s.start(0, here.entry, 0)),
      k + s.start(1, 0, key_head),
      v + s.start(2, 0, key_head),
      k_scale,
      v_scale,
      table,
      slopes,
      sinks,
      out,
      lse,
      parts,
      part_sums,
      PACKED ? ulong(here.first_query) : ulong(here.entry) * s.heads() * s.queries()};
  if (SCALES) {
    x.k_scale += s.start(3, 0, key_head);
    x.v_scale += s.start(4, 0, key_head);
  }
  attend_cached<D, DV, SIMDGROUPS, KEYS, LEFT, CAP, ALIBI, SINKS, SCALES, true, WHOLE>(
      x, s, here, key_head, group.x, scale, cap, q_tile, kv_tile, rows, scales, is_finite,
      thread_index, lane, simdgroup);
}
