// SPDX-License-Identifier: MIT
// p = exp(score - lse);  delta = sum(dout * out) - dlse;  ds = p * (dout v^T - delta)
// dq = scale * ds k;  dk = scale * ds^T q;  dv = p^T dout;  dsink = -sum(exp(sink - lse) * delta)
//
// Scores are computed again. attention_dq: a threadgroup takes queries and goes through the keys;
// attention_dkv: it takes keys, and goes through the queries of all heads that they serve. So no
// two threadgroups add to one value, and sums have one order.

#include "attention.h"
#include "attention_sizes.h"
#include "reduce.h"

// One simdgroup for each row of dout and out.
template <typename T, bool DLSE, int SIMDGROUPS>
[[max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] kernel void attention_delta(
    device const T* dout [[buffer(0)]],
    device const T* out [[buffer(1)]],
    device const float* dlse [[buffer(2)]],
    device const float* lse [[buffer(3)]],
    device float* delta [[buffer(4)]],
    constant long* size [[buffer(5)]],
    constant long* stride [[buffer(6)]],
    uint row [[simdgroup_index_in_threadgroup]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  const attention_sizes s = {size, stride};
  row += group * SIMDGROUPS;
  const uint queries = uint(s.queries()), heads = s.heads();
  const uint query = row % queries, head = row / queries % heads, entry = row / queries / heads;
  if (entry >= s.sequences()) {
    return;
  }
  const sequence all = {0, 0, int(queries), 0, s.keys()};
  dout += s.start(0, entry, head, int(query));
  out += s.out_start(entry, head, all, int(query));
  float sum = 0.0f;
  for (uint i = lane; i < s.value_size(); i += 32) {
    sum += float(dout[i]) * float(out[i]);
  }
  sum = simd_sum(sum);
  if (lane == 0) {
    // a query without keys passes nothing on
    delta[row] = lse[row] == -INFINITY ? 0.0f : DLSE ? sum - dlse[row] : sum;
  }
}

// One threadgroup for each head.
template <int THREADS>
[[max_total_threads_per_threadgroup(THREADS)]] kernel void attention_dsinks(
    device const float* sinks [[buffer(0)]],
    device const float* lse [[buffer(1)]],
    device const float* delta [[buffer(2)]],
    device float* dsinks [[buffer(3)]],
    constant uint& entries [[buffer(4)]],
    constant uint& heads [[buffer(5)]],
    constant uint& queries [[buffer(6)]],
    uint head [[threadgroup_position_in_grid]],
    uint lane [[thread_position_in_threadgroup]]) {
  threadgroup float scratch[32];
  float sum = 0.0f;
  for (uint entry = 0; entry < entries; ++entry) {
    const ulong first = (ulong(entry) * heads + head) * queries;
    for (uint i = lane; i < queries; i += THREADS) {
      sum -= precise::exp(sinks[head] - lse[first + i]) * delta[first + i];
    }
  }
  sum = threadgroup_sum(sum, scratch, lane, THREADS);
  if (lane == 0) {
    dsinks[head] = sum;
  }
}

// Writes a simdgroup's sums [8, 8 * COLUMNS], times `by`, to a row of which `width` values exist.
template <int COLUMNS, typename T>
inline void write_row(
    device T* to, thread const simdgroup_float8x8* sums, float by, uint width, uint2 place) {
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const uint column = c * 8 + place.x + e;
      if (column < width) {
        to[column] = T(sums[c].thread_elements()[e] * by);
      }
    }
  }
}

// Rows `first` to `first + ROWS` of x [.., width], with zeros for queries that see no key: these
// may hold anything.
template <int ROWS, int WIDTH, int THREADS, typename T>
inline void stage_seen(
    threadgroup T* to,
    device const T* x,
    uint stride,
    int first,
    uint width,
    threadgroup const float* lse,
    uint worker) {
  constexpr uint LANES = staging<WIDTH, THREADS>::LANES, STEP = staging<WIDTH, THREADS>::STEP;
  float zero = 0.0f;
#pragma unroll 1
  for (uint r = worker / LANES; r < ROWS; r += STEP) {
    const uint at = (uint(first) + r) * stride, there = lse[r] != -INFINITY ? width : 0;
    stage_row<WIDTH, LANES>(to + r * WIDTH, x, at, there, worker % LANES, zero);
  }
}

// rows [8, SIZE] of tile a times those of tile b, [8 * COLUMNS, SIZE].
template <int SIZE, int COLUMNS, typename T>
inline void multiply_rows(
    thread simdgroup_float8x8* products,
    threadgroup const T* a,
    threadgroup const T* b,
    uint2 place) {
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j) {
    products[j] = simdgroup_float8x8(0.0f);
  }
  for (int d = 0; d < SIZE; d += 8) {
    const simdgroup_float8x8 left = tile_at(a + d, SIZE, place);
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      const simdgroup_float8x8 right = turned_tile_at(b + j * 8 * SIZE + d, SIZE, place);
      simdgroup_multiply_accumulate(products[j], left, right, products[j]);
    }
  }
}

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
    bool PACKED>
// mslsim: allow(spills): a few of the sums of heads of 256
[[max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] kernel void attention_dq(
    device const T* q [[buffer(0)]],
    device const T* k [[buffer(1)]],
    device const T* v [[buffer(2)]],
    device const M* mask [[buffer(3)]],
    device const float* slopes [[buffer(4)]],
    device const float* sinks [[buffer(5)]],
    device const int* starts_q [[buffer(6)]],
    device const int* starts_k [[buffer(7)]],
    device const T* dout [[buffer(8)]],
    device const float* lse [[buffer(9)]],
    device const float* delta [[buffer(10)]],
    device T* dq [[buffer(11)]],
    constant long* size [[buffer(12)]],
    constant long* stride [[buffer(13)]],
    constant long* dout_stride [[buffer(14)]],
    constant float& scale [[buffer(15)]],
    constant float& cap [[buffer(16)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int ROWS = SIMDGROUPS * 8;
  constexpr int THREADS = SIMDGROUPS * 32;
  threadgroup T q_tile[SIMDGROUPS * 8 * D];
  threadgroup T dout_tile[SIMDGROUPS * 8 * DV];
  threadgroup T k_tile[KEYS * D];
  threadgroup T v_tile[KEYS * DV];
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
  const attention_sizes of_dout = {size, dout_stride};
  dout += of_dout.q_start(entry, head, here);

  const int first = here.tile * ROWS;
  const uint2 place = place_in_tile(lane);
  const int query = first + int(simdgroup * 8 + place.y);
  stage<SIMDGROUPS * 8, D, THREADS>(
      q_tile, q, s.q_row(), first, here.queries, s.head_size(), thread_index);
  stage<SIMDGROUPS * 8, DV, THREADS>(
      dout_tile, dout, of_dout.q_row(), first, here.queries, s.value_size(), thread_index);
  const ulong row = s.lse_start(entry, head, here) + query;
  const bool is_there = query < here.queries;
  const float own_lse = is_there ? lse[row] * kLog2e : 0.0f;
  const float own_delta = is_there ? delta[row] : 0.0f;

  simdgroup_float8x8 sums[D / 8];
#pragma unroll
  for (int c = 0; c < D / 8; ++c) {
    sums[c] = simdgroup_float8x8(0.0f);
  }
  const int begin = LEFT ? max(0, rule.position(first) - rule.left) / KEYS * KEYS : 0;
  const int end = RIGHT ? min(here.keys, rule.position(first + ROWS) + rule.right) : here.keys;
  for (int from = begin; from < end; from += KEYS) {
    // the keys of the turn before have been read
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const bool mine =
        stage<KEYS, D, THREADS>(k_tile, k, s.k_row(), from, here.keys, s.head_size(), thread_index);
    stage<KEYS, DV, THREADS>(v_tile, v, s.v_row(), from, here.keys, s.value_size(), thread_index);
    const bool are_finite = all_of_group<SIMDGROUPS>(mine, is_finite, simdgroup, lane);

    simdgroup_float8x8 ds[KEYS / 8];
    simdgroup_float8x8 dp[KEYS / 8];
    multiply_rows<D, KEYS / 8>(ds, q_tile + simdgroup * 8 * D, k_tile, place);
    multiply_rows<DV, KEYS / 8>(dp, dout_tile + simdgroup * 8 * DV, v_tile, place);
    uint seen = 0;
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int key = from + j * 8 + int(place.x) + e;
        float slope = 1.0f;
        const float x = rule.score(ds[j].thread_elements()[e], query, key, slope);
        const bool is_seen = x != -INFINITY;
        const float p = exp2(x - own_lse);
        const float d = p * (dp[j].thread_elements()[e] - own_delta) * slope;
        ds[j].thread_elements()[e] = is_seen ? d : 0.0f;
        seen |= is_seen ? 1u << (2 * j + e) : 0u;
      }
    }
    add_products<KEYS / 8, D / 8, D>(sums, ds, seen, k_tile, are_finite, place);
  }
  if (is_there) {
    const ulong at = (ulong(entry) * s.queries() + here.first_query + query) * s.heads() + head;
    write_row<D / 8>(dq + at * s.head_size(), sums, scale, s.head_size(), place);
  }
}

// KEY, VALUE: which of the two gradients are computed. Of large heads both are too many at once.
template <
    typename T,
    typename M,
    int D,
    int DV,
    int WIDTH,
    int SIMDGROUPS,
    int QUERIES,
    bool MASK,
    bool LEFT,
    bool RIGHT,
    bool CAP,
    bool ALIBI,
    bool PACKED,
    bool KEY,
    bool VALUE>
[[max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] kernel void attention_dkv(
    device const T* q [[buffer(0)]],
    device const T* k [[buffer(1)]],
    device const T* v [[buffer(2)]],
    device const M* mask [[buffer(3)]],
    device const float* slopes [[buffer(4)]],
    device const float* sinks [[buffer(5)]],
    device const int* starts_q [[buffer(6)]],
    device const int* starts_k [[buffer(7)]],
    device const T* dout [[buffer(8)]],
    device const float* lse [[buffer(9)]],
    device const float* delta [[buffer(10)]],
    device T* dk [[buffer(11)]],
    device T* dv [[buffer(12)]],
    constant long* size [[buffer(13)]],
    constant long* stride [[buffer(14)]],
    constant long* dout_stride [[buffer(15)]],
    constant float& scale [[buffer(16)]],
    constant float& cap [[buffer(17)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int ROWS = SIMDGROUPS * 8;
  constexpr int THREADS = SIMDGROUPS * 32;
  threadgroup T k_tile[SIMDGROUPS * 8 * D];
  threadgroup T v_tile[SIMDGROUPS * 8 * DV];
  threadgroup T q_tile[QUERIES * D];
  threadgroup T dout_tile[QUERIES * DV];
  threadgroup float lse_tile[QUERIES];
  threadgroup float delta_tile[QUERIES];
  const attention_sizes s = {size, stride};
  const attention_sizes of_dout = {size, dout_stride};
  const uint key_head = group.y, entry = group.z;
  const sequence here = find_sequence<PACKED, ROWS>(s, starts_q, starts_k, group.x, true);
  if (here.tile < 0) {
    return;
  }
  const int first = here.tile * ROWS;
  const uint2 place = place_in_tile(lane);
  const int key = first + int(simdgroup * 8 + place.y);
  const uint first_head = key_head * s.heads_per_key();
  stage<SIMDGROUPS * 8, D, THREADS>(
      k_tile, k + s.k_start(entry, first_head, here), s.k_row(), first, here.keys, s.head_size(),
      thread_index);
  stage<SIMDGROUPS * 8, DV, THREADS>(
      v_tile, v + s.v_start(entry, first_head, here), s.v_row(), first, here.keys, s.value_size(),
      thread_index);

  simdgroup_float8x8 dk_sums[KEY ? D / 8 : 1];
  simdgroup_float8x8 dv_sums[VALUE ? DV / 8 : 1];
#pragma unroll
  for (int c = 0; c < (KEY ? D / 8 : 1); ++c) {
    dk_sums[c] = simdgroup_float8x8(0.0f);
  }
#pragma unroll
  for (int c = 0; c < (VALUE ? DV / 8 : 1); ++c) {
    dv_sums[c] = simdgroup_float8x8(0.0f);
  }
  for (uint head = first_head; head < first_head + s.heads_per_key(); ++head) {
    score_rule<M, MASK, LEFT, RIGHT, CAP, ALIBI> rule = {
        mask, s.mask_query(), s.mask_key(), scale,    cap,
        0.0f, here.queries,   here.keys,    s.left(), s.right()};
    rule.mask += MASK ? s.mask_start(entry, head, here) : 0;
    rule.alibi = ALIBI ? slopes[s.slope(entry, head)] : 0.0f;
    const ulong rows = s.lse_start(entry, head, here);
    // the query that stands at the first key, and those that see it or a later one of this tile
    const int at = first - rule.position(0);
    const int begin = RIGHT ? max(0, at - rule.right) / QUERIES * QUERIES : 0;
    const int end = LEFT ? min(here.queries, at + ROWS + rule.left) : here.queries;
    for (int from = begin; from < end; from += QUERIES) {
      // the queries of the turn before have been read
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint i = thread_index; i < QUERIES; i += THREADS) {
        const int query = from + int(i);
        const bool is_there = query < here.queries;
        lse_tile[i] = is_there ? lse[rows + query] * kLog2e : -INFINITY;
        delta_tile[i] = is_there ? delta[rows + query] : 0.0f;
      }
      // the next look at which queries see anything
      threadgroup_barrier(mem_flags::mem_threadgroup);
      stage_seen<QUERIES, D, THREADS>(
          q_tile, q + s.q_start(entry, head, here), s.q_row(), from, s.head_size(), lse_tile,
          thread_index);
      stage_seen<QUERIES, DV, THREADS>(
          dout_tile, dout + of_dout.q_start(entry, head, here), of_dout.q_row(), from,
          s.value_size(), lse_tile, thread_index);
      // the queries are there
      threadgroup_barrier(mem_flags::mem_threadgroup);

      simdgroup_float8x8 p[QUERIES / 8];
      simdgroup_float8x8 ds[QUERIES / 8];
      multiply_rows<D, QUERIES / 8>(p, k_tile + simdgroup * 8 * D, q_tile, place);
      multiply_rows<DV, QUERIES / 8>(ds, v_tile + simdgroup * 8 * DV, dout_tile, place);
#pragma unroll
      for (int j = 0; j < QUERIES / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const uint column = j * 8 + place.x + e;
          float slope = 1.0f;
          const float x = rule.score(p[j].thread_elements()[e], from + int(column), key, slope);
          const bool is_seen = x != -INFINITY;
          const float w = exp2(x - lse_tile[column]);
          const float d = w * (ds[j].thread_elements()[e] - delta_tile[column]) * slope;
          p[j].thread_elements()[e] = is_seen ? w : 0.0f;
          ds[j].thread_elements()[e] = is_seen ? d : 0.0f;
        }
      }
      if (VALUE) {
        add_products<QUERIES / 8, VALUE ? DV / 8 : 1, DV>(dv_sums, p, 0, dout_tile, true, place);
      }
      if (KEY) {
        add_products<QUERIES / 8, KEY ? D / 8 : 1, D>(dk_sums, ds, 0, q_tile, true, place);
      }
    }
  }
  if (key < here.keys) {
    const uint key_heads = s.heads() / s.heads_per_key();
    const ulong at = (ulong(entry) * s.keys() + here.first_key + key) * key_heads + key_head;
    if (KEY) {
      write_row<KEY ? D / 8 : 1>(dk + at * s.head_size(), dk_sums, scale, s.head_size(), place);
    }
    if (VALUE) {
      write_row<VALUE ? DV / 8 : 1>(dv + at * s.value_size(), dv_sums, 1.0f, s.value_size(), place);
    }
  }
}
