// SPDX-License-Identifier: MIT
// out = softmax(scale * q k^T, with masks) v of the last queries over a cache [B, Hk, T, D], in two
// phases: parts of the keys, then their merge in order. Entry b has lengths[b] keys; what the cache
// holds after them is not read.
//
// A threadgroup takes a part of the keys and 8 * SIMDGROUPS rows: queries of all heads that share
// the keys. Codes S of 8 bits become T, which holds each of them, and their scales multiply scores
// and weights.

#include "over_cache.h"

template <
    typename T,
    typename S,
    int D,
    int DV,
    int WIDTH,
    int SIMDGROUPS,
    int KEYS,
    bool LENGTHS,
    bool LEFT,
    bool CAP,
    bool ALIBI,
    bool SINKS,
    bool SCALES,
    bool WHOLE>
// mslsim: allow(code): tiles are multiplied in registers, which takes constant indices
[[max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] kernel void attention_decode(
    device const T* q [[buffer(0)]],
    device const S* k [[buffer(1)]],
    device const S* v [[buffer(2)]],
    device const float* k_scale [[buffer(3)]],
    device const float* v_scale [[buffer(4)]],
    device const int* lengths [[buffer(5)]],
    device const float* slopes [[buffer(6)]],
    device const float* sinks [[buffer(7)]],
    device T* out [[buffer(8)]],
    device float* lse [[buffer(9)]],
    device float* parts [[buffer(10)]],
    device float* part_sums [[buffer(11)]],
    constant long* size [[buffer(12)]],
    constant long* stride [[buffer(13)]],
    constant float& scale [[buffer(14)]],
    constant float& cap [[buffer(15)]],
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
  cached_sequence here = find_tile<SIMDGROUPS * 8, false>(s, lengths, group.z);
  here.keys = LENGTHS ? clamp(lengths[here.entry], 0, s.capacity()) : s.capacity();
  cached_tensors<T, S> x = {
      q + s.start(0, here.entry, 0),
      k + s.start(1, here.entry, key_head),
      v + s.start(2, here.entry, key_head),
      k_scale,
      v_scale,
      lengths,
      slopes,
      sinks,
      out,
      lse,
      parts,
      part_sums,
      ulong(here.entry) * s.heads() * s.queries()};
  if (SCALES) {
    x.k_scale += s.start(3, here.entry, key_head);
    x.v_scale += s.start(4, here.entry, key_head);
  }
  attend_cached<D, DV, SIMDGROUPS, KEYS, LEFT, CAP, ALIBI, SINKS, SCALES, false, WHOLE>(
      x, s, here, key_head, group.x, scale, cap, q_tile, kv_tile, rows, scales, is_finite,
      thread_index, lane, simdgroup);
}

// The parts of a row become its result: one simdgroup for each query of each head, PER values of a
// result in each lane.
template <
    typename T,
    int PER,
    int SIMDGROUPS,
    bool LENGTHS,
    bool STARTS,
    bool PACKED,
    bool LEFT,
    bool SINKS>
[[max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] kernel void attention_merge(
    device const float* parts [[buffer(0)]],
    device const float* part_sums [[buffer(1)]],
    device const int* lengths [[buffer(2)]],
    device const int* starts_q [[buffer(3)]],
    device const float* sinks [[buffer(4)]],
    device T* out [[buffer(5)]],
    device float* lse [[buffer(6)]],
    constant long* size [[buffer(7)]],
    constant long* stride [[buffer(8)]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const cache_sizes s = {size, stride};
  const uint row = group * SIMDGROUPS + simdgroup;
  if (row >= s.rows()) {
    return;
  }
  const uint head = row % s.heads();
  const int place = int(row / s.heads());
  uint entry = 0;
  int query = place, queries = s.queries();
  if (PACKED) {
    while (entry + 1 < s.entries() && starts_q[entry + 1] <= place) {
      ++entry;
    }
    query = place - starts_q[entry];
    queries = starts_q[entry + 1] - starts_q[entry];
  } else {
    entry = uint(place) / uint(queries);
    query = int(uint(place) % uint(queries));
  }
  int keys = s.capacity();
  if (LENGTHS) {
    keys = clamp(STARTS ? lengths[entry + 1] - lengths[entry] : lengths[entry], 0, keys);
  }
  const int position = query + keys - queries;
  const int end = min(keys, position + 1);
  const int begin = LEFT ? max(0, position - s.left()) : 0;
  const uint first = uint(begin / s.part());
  const uint last = end > begin ? uint((end - 1) / s.part()) + 1 : first;

  float most = SINKS ? sinks[head] * kLog2e : -1e30f;
  for (uint p = first; p < last; ++p) {
    most = max(most, part_sums[2 * (p * s.rows() + row)]);
  }
  float total = SINKS ? exp2(sinks[head] * kLog2e - most) : 0.0f;
  float sums[PER];
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    sums[i] = 0.0f;
  }
  for (uint p = first; p < last; ++p) {
    const ulong at = p * s.rows() + row;
    const float factor = exp2(part_sums[2 * at] - most);
    total += part_sums[2 * at + 1] * factor;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const uint column = lane + i * 32;
      if (column < s.value_size()) {
        sums[i] += parts[at * s.value_size() + column] * factor;
      }
    }
  }
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    const uint column = lane + i * 32;
    if (column < s.value_size()) {
      out[ulong(row) * s.value_size() + column] = T(sums[i] * inverse);
    }
  }
  if (lane == 0) {
    const ulong before = PACKED ? 0 : ulong(entry) * s.heads() * s.queries();
    const ulong at = before + head * ulong(s.queries()) + uint(PACKED ? place : query);
    lse[at] = total == 0.0f ? -INFINITY : most / kLog2e + precise::log(total);
  }
}
