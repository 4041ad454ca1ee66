// SPDX-License-Identifier: MIT
// out = softmax(scale * q k^T, with masks) v;  lse = log of the softmax's denominator
//
// One threadgroup takes 8 * SIMDGROUPS queries of a head, a simdgroup eight of them, and goes
// through the keys KEYS at a time. Its sums stay in registers; their scale follows the largest
// score so far. D and DV are the sizes of heads, rounded up to 8; WIDTH is the larger one.

#include "attention.h"
#include "attention_sizes.h"

template <
    typename T,
    typename M,
    int D,
    int DV,
    int WIDTH,
    int SIMDGROUPS,
    int KEYS,
    bool MASK,
    bool LEFT,
    bool RIGHT,
    bool CAP,
    bool ALIBI,
    bool SINKS,
    bool PACKED>
// mslsim: allow(code): tiles are multiplied in registers, which takes constant indices
[[max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] kernel void attention(
    device const T* q [[buffer(0)]],
    device const T* k [[buffer(1)]],
    device const T* v [[buffer(2)]],
    device const M* mask [[buffer(3)]],
    device const float* slopes [[buffer(4)]],
    device const float* sinks [[buffer(5)]],
    device const int* starts_q [[buffer(6)]],
    device const int* starts_k [[buffer(7)]],
    device T* out [[buffer(8)]],
    device float* lse [[buffer(9)]],
    constant long* size [[buffer(10)]],
    constant long* stride [[buffer(11)]],
    constant float& scale [[buffer(12)]],
    constant float& cap [[buffer(13)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int ROWS = SIMDGROUPS * 8;
  constexpr int THREADS = SIMDGROUPS * 32;
  // wider heads leave no registers for it
  constexpr int UNROLL = D <= 128 ? 16 : 2;
  threadgroup T q_tile[SIMDGROUPS * 8 * D];
  threadgroup T kv_tile[KEYS * WIDTH];
  threadgroup int is_finite[SIMDGROUPS];
  const attention_sizes s = {size, stride};
  const uint head = group.y, entry = group.z;
  const sequence here = find_sequence<PACKED, ROWS>(s, starts_q, starts_k, group.x);
  if (here.tile < 0) {
    return;
  }
  score_rule<M, MASK, LEFT, RIGHT, CAP, ALIBI> rule = {
      mask, s.mask_query(), s.mask_key(), scale,    cap,
      0.0f, here.queries,   here.keys,    s.left(), s.right()};
  rule.mask += MASK ? s.mask_start(entry, head, here) : 0;
  rule.alibi = ALIBI ? slopes[s.slope(entry, head)] : 0.0f;
  q += s.q_start(entry, head, here);
  k += s.k_start(entry, head, here);
  v += s.v_start(entry, head, here);

  const int first = here.tile * ROWS;
  const uint2 place = place_in_tile(lane);
  const int query = first + int(simdgroup * 8 + place.y);
  stage<SIMDGROUPS * 8, D, THREADS>(
      q_tile, q, s.q_row(), first, here.queries, s.head_size(), thread_index);

  simdgroup_float8x8 sums[DV / 8];
#pragma unroll
  for (int c = 0; c < DV / 8; ++c) {
    sums[c] = simdgroup_float8x8(0.0f);
  }
  // finite, so that no difference from it is NaN
  float most = SINKS ? sinks[head] * kLog2e : -1e30f;
  float sum = SINKS && place.x == 0 ? 1.0f : 0.0f;

  const int begin = LEFT ? max(0, rule.position(first) - rule.left) / KEYS * KEYS : 0;
  const int end = RIGHT ? min(here.keys, rule.position(first + ROWS) + rule.right) : here.keys;
  for (int from = begin; from < end; from += KEYS) {
    // the values of the turn before have been read
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage<KEYS, D, THREADS>(kv_tile, k, s.k_row(), from, here.keys, s.head_size(), thread_index);
    // the keys, and at first the queries, are there
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_float8x8 p[KEYS / 8];
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j) {
      p[j] = simdgroup_float8x8(0.0f);
    }
#pragma unroll(UNROLL)
    for (int d = 0; d < D; d += 8) {
      const simdgroup_float8x8 a = tile_at(q_tile + simdgroup * 8 * D + d, D, place);
#pragma unroll
      for (int j = 0; j < KEYS / 8; ++j) {
        const simdgroup_float8x8 b = turned_tile_at(kv_tile + j * 8 * D + d, D, place);
        simdgroup_multiply_accumulate(p[j], a, b, p[j]);
      }
    }

    float now = most;
    uint seen = 0;
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int key = from + j * 8 + int(place.x) + e;
        float slope;
        const float x = rule.score(p[j].thread_elements()[e], query, key, slope);
        p[j].thread_elements()[e] = x;
        seen |= x == -INFINITY ? 0u : 1u << (2 * j + e);
        now = max(now, x);
      }
    }
    now = row_max(now);
    const float factor = exp2(most - now);
    most = now;
    sum *= factor;
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float x = exp2(p[j].thread_elements()[e] - most);
        p[j].thread_elements()[e] = x;
        sum += x;
      }
    }
#pragma unroll
    for (int c = 0; c < DV / 8; ++c) {
      sums[c].thread_elements()[0] *= factor;
      sums[c].thread_elements()[1] *= factor;
    }

    // the keys have been read
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const bool mine = stage<KEYS, DV, THREADS>(
        kv_tile, v, s.v_row(), from, here.keys, s.value_size(), thread_index);
    const bool are_finite = all_of_group<SIMDGROUPS>(mine, is_finite, simdgroup, lane);
    add_products<KEYS / 8, DV / 8, DV>(sums, p, seen, kv_tile, are_finite, place);
  }

  const float total = row_sum(sum);
  if (query >= here.queries) {
    return;
  }
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
  out += s.out_start(entry, head, here, query);
#pragma unroll
  for (int c = 0; c < DV / 8; ++c) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const uint column = c * 8 + place.x + e;
      if (column < s.value_size()) {
        out[column] = T(sums[c].thread_elements()[e] * inverse);
      }
    }
  }
  if (place.x == 0) {
    lse[s.lse_start(entry, head, here) + query] =
        total == 0.0f ? -INFINITY : most / kLog2e + precise::log(total);
  }
}
