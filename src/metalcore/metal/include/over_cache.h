// SPDX-License-Identifier: MIT
// Attention over a cache: rows are the queries of all heads that share keys, query by query, so
// that a threadgroup reads keys and values once for 8 * SIMDGROUPS of them. What a part of the keys
// gives is merged later: the largest score, the sum of weights, and the sum of weighted values.
#pragma once

#include "attention.h"
#include "attention_sizes.h"

// A sequence, and the tile of its rows that a threadgroup takes: -1 for none.
struct cached_sequence {
  int tile;
  uint entry;
  int first_query;
  int queries;
  int keys;
  uint first_place;
};

struct cache_sizes {
  constant long* size;
  constant long* stride;

  uint heads() const { return uint(size[0]); }
  uint group() const { return uint(size[1]); }
  int queries() const { return int(size[2]); }
  int capacity() const { return int(size[3]); }
  uint head_size() const { return uint(size[4]); }
  uint value_size() const { return uint(size[5]); }
  int left() const { return int(size[6]); }
  uint entries() const { return uint(size[7]); }
  int part() const { return int(size[8]); }
  uint page_bits() const { return uint(size[9]); }
  uint table_width() const { return uint(size[10]); }
  int pages() const { return int(size[11]); }
  ulong rows() const { return ulong(size[12]); }

  // of tensor `which`, by entry, head and row: q, k, v, and scales of k and v
  ulong start(uint which, uint entry, uint head) const {
    return entry * ulong(stride[3 * which]) + head * ulong(stride[3 * which + 1]);
  }
  uint row(uint which) const { return uint(stride[3 * which + 2]); }
  ulong slope(uint entry, uint head) const { return entry * ulong(stride[15]) + head; }

  // the number of a query's row among those of all heads, [queries, heads]
  ulong out_row(cached_sequence at, uint head, int query) const {
    return (ulong(at.first_query) + query) * heads() + head;
  }
};

// The sequence that tile number `tile` is of: as many tiles for each entry, or by starts of
// queries.
template <int ROWS, bool PACKED>
inline cached_sequence find_tile(cache_sizes s, device const int* starts_q, uint tile) {
  if (!PACKED) {
    const uint tiles = (uint(s.queries()) * s.group() + ROWS - 1) / ROWS;
    const uint entry = tile / tiles;
    return cached_sequence{int(tile % tiles), entry, int(entry) * s.queries(), s.queries(), 0, 0};
  }
  for (uint entry = 0; entry < s.entries(); ++entry) {
    const int queries = starts_q[entry + 1] - starts_q[entry];
    const uint tiles = (uint(queries) * s.group() + ROWS - 1) / ROWS;
    if (tile < tiles) {
      return cached_sequence{int(tile), entry, starts_q[entry], queries, 0, 0};
    }
    tile -= tiles;
  }
  return cached_sequence{-1, 0, 0, 0, 0, 0};
}

// Tensors of a call; which are read depends on its variant.
template <typename T, typename S>
struct cached_tensors {
  device const T* q;
  device const S* k;
  device const S* v;
  device const float* k_scale;
  device const float* v_scale;
  device const int* table;
  device const float* slopes;
  device const float* sinks;
  device T* out;
  device float* lse;
  device float* parts;
  device float* part_sums;
  ulong lse_start;
};

// Rows of x by their numbers, and zeros where that is negative; whether all are finite.
template <int ROWS, int WIDTH, int THREADS, typename T, typename S>
inline bool stage_rows(
    threadgroup T* to,
    device const S* x,
    uint stride,
    threadgroup const int* rows,
    uint width,
    uint worker) {
  constexpr uint LANES = staging<WIDTH, THREADS>::LANES, STEP = staging<WIDTH, THREADS>::STEP;
  float zero = 0.0f;
#pragma unroll 1
  for (uint r = worker / LANES; r < ROWS; r += STEP) {
    const int row = rows[r];
    const uint at = row >= 0 ? uint(row) * stride : 0, there = row >= 0 ? width : 0;
    stage_row<WIDTH, LANES>(to + r * WIDTH, x, at, there, worker % LANES, zero);
  }
  return zero == 0.0f;
}

// The rows of the cache that keys from `from` on are, -1 for those that are not there; and scales.
template <int KEYS, int THREADS, bool PAGED, bool SCALES, typename T, typename S>
inline bool stage_places(
    thread const cached_tensors<T, S>& x,
    cache_sizes s,
    cached_sequence here,
    int from,
    int end,
    threadgroup int* rows,
    threadgroup float* scales,
    uint worker) {
  bool is_finite = true;
  for (uint i = worker; i < KEYS; i += THREADS) {
    const int key = from + int(i);
    int row = key < end ? key : -1;
    if (PAGED && row >= 0) {
      const uint bits = s.page_bits();
      const int page = x.table[here.first_place + (uint(key) >> bits)];
      const bool is_there = page >= 0 && page < s.pages();
      row = is_there ? (page << bits) + int(uint(key) & ((1u << bits) - 1)) : -1;
    }
    rows[i] = row;
    if (SCALES) {
      scales[i] = row >= 0 ? x.k_scale[ulong(row) * s.row(3)] : 0.0f;
      const float scale = row >= 0 ? x.v_scale[ulong(row) * s.row(4)] : 0.0f;
      scales[KEYS + i] = scale;
      is_finite = is_finite && isfinite(scale);
    }
  }
  return is_finite;
}

// Queries of a tile, row by row.
template <int ROWS, int D, int THREADS, typename T>
inline void stage_queries(
    threadgroup T* to,
    device const T* q,
    cache_sizes s,
    cached_sequence here,
    uint key_head,
    uint worker) {
  constexpr uint LANES = staging<D, THREADS>::LANES, STEP = staging<D, THREADS>::STEP;
  float zero = 0.0f;
#pragma unroll 1
  for (uint r = worker / LANES; r < ROWS; r += STEP) {
    const uint row = uint(here.tile) * ROWS + r;
    const uint query = row / s.group(), head = key_head * s.group() + row % s.group();
    const uint there = int(query) < here.queries ? s.head_size() : 0;
    device const T* of_head = q + (there == 0 ? 0 : head * ulong(s.stride[1]));
    const uint at = there == 0 ? 0 : query * s.row(0);
    stage_row<D, LANES>(to + r * D, of_head, at, there, worker % LANES, zero);
  }
}

// A tile of rows over part number `part` of the keys, or with WHOLE over all of them. The pointers
// of `x` are those of the head of keys, and of the sequence's first query.
template <
    int D,
    int DV,
    int SIMDGROUPS,
    int KEYS,
    bool LEFT,
    bool CAP,
    bool ALIBI,
    bool SINKS,
    bool SCALES,
    bool PAGED,
    bool WHOLE,
    typename T,
    typename S>
inline void attend_cached(
    thread const cached_tensors<T, S>& x,
    cache_sizes s,
    cached_sequence here,
    uint key_head,
    uint part,
    float scale,
    float cap,
    threadgroup T* q_tile,
    threadgroup T* kv_tile,
    threadgroup int* rows,
    threadgroup float* scales,
    threadgroup int* is_finite,
    uint thread_index,
    uint lane,
    uint simdgroup) {
  constexpr int ROWS = SIMDGROUPS * 8;
  constexpr int THREADS = SIMDGROUPS * 32;
  score_rule<bool, false, LEFT, true, CAP, ALIBI> rule = {
      nullptr, 0, 0, scale, cap, 0.0f, here.queries, here.keys, s.left(), 0};
  const int first = int(uint(here.tile) * ROWS / s.group());
  const int last = min(here.queries, int((uint(here.tile + 1) * ROWS - 1) / s.group()) + 1);
  int begin = LEFT ? max(0, rule.position(first) - rule.left) : 0;
  int end = min(here.keys, rule.position(last));
  if (!WHOLE) {
    begin = max(begin, int(part) * s.part());
    end = min(end, int(part + 1) * s.part());
    if (begin >= end) {
      return;
    }
  }
  const uint2 place = place_in_tile(lane);
  const uint row = uint(here.tile) * ROWS + simdgroup * 8 + place.y;
  const int query = int(row / s.group());
  const uint head = key_head * s.group() + row % s.group();
  if (ALIBI && query < here.queries) {
    rule.alibi = x.slopes[s.slope(here.entry, head)];
  }
  stage_queries<SIMDGROUPS * 8, D, THREADS>(q_tile, x.q, s, here, key_head, thread_index);

  simdgroup_float8x8 sums[DV / 8];
#pragma unroll
  for (int c = 0; c < DV / 8; ++c) {
    sums[c] = simdgroup_float8x8(0.0f);
  }
  // finite, so that no difference from it is NaN
  float most = -1e30f, sum = 0.0f;
  if (SINKS && WHOLE && query < here.queries) {
    most = x.sinks[head] * kLog2e;
    sum = place.x == 0 ? 1.0f : 0.0f;
  }

  for (int from = begin; from < end; from += KEYS) {
    // places of the turn before were read before all knew whether its values are finite
    bool mine = stage_places<KEYS, THREADS, PAGED, SCALES>(
        x, s, here, from, end, rows, scales, thread_index);
    // places are there, and values of the turn before have been read
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage_rows<KEYS, D, THREADS>(kv_tile, x.k, s.row(1), rows, s.head_size(), thread_index);
    // the keys, and at first the queries, are there
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_float8x8 p[KEYS / 8];
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j) {
      p[j] = simdgroup_float8x8(0.0f);
    }
#pragma unroll 2
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
        const uint at = j * 8 + place.x + e;
        float product = p[j].thread_elements()[e];
        if (SCALES) {
          product *= scales[at];
        }
        float slope;
        float score = rule.score(product, query, from + int(at), slope);
        score = rows[at] >= 0 ? score : -INFINITY;
        p[j].thread_elements()[e] = score;
        seen |= score == -INFINITY ? 0u : 1u << (2 * j + e);
        now = max(now, score);
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
        const float weight = exp2(p[j].thread_elements()[e] - most);
        p[j].thread_elements()[e] = SCALES ? weight * scales[KEYS + j * 8 + place.x + e] : weight;
        sum += weight;
      }
    }
#pragma unroll
    for (int c = 0; c < DV / 8; ++c) {
      sums[c].thread_elements()[0] *= factor;
      sums[c].thread_elements()[1] *= factor;
    }

    // the keys have been read
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const bool are_mine_finite =
        stage_rows<KEYS, DV, THREADS>(kv_tile, x.v, s.row(2), rows, s.value_size(), thread_index);
    mine = mine && are_mine_finite;
    const bool are_finite = all_of_group<SIMDGROUPS>(mine, is_finite, simdgroup, lane);
    add_products<KEYS / 8, DV / 8, DV>(sums, p, seen, kv_tile, are_finite, place);
  }

  const float total = row_sum(sum);
  if (query >= here.queries) {
    return;
  }
  const ulong at = s.out_row(here, head, query);
  const float inverse = !WHOLE ? 1.0f : total == 0.0f ? 0.0f : 1.0f / total;
  const ulong start = (WHOLE ? at : part * s.rows() + at) * s.value_size();
#pragma unroll
  for (int c = 0; c < DV / 8; ++c) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const uint column = c * 8 + place.x + e;
      if (column < s.value_size()) {
        const float value = sums[c].thread_elements()[e] * inverse;
        if (WHOLE) {
          x.out[start + column] = T(value);
        } else {
          x.parts[start + column] = value;
        }
      }
    }
  }
  if (place.x == 0) {
    if (WHOLE) {
      x.lse[x.lse_start + head * ulong(s.queries()) + uint(query)] =
          total == 0.0f ? -INFINITY : most / kLog2e + precise::log(total);
    } else {
      x.part_sums[2 * (part * s.rows() + at)] = most;
      x.part_sums[2 * (part * s.rows() + at) + 1] = total;
    }
  }
}
