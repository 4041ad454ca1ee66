// SPDX-License-Identifier: MIT
// A[t][j] = s q_t k_j exp(w_j - c_t);  h_t = (A V + s q_t C exp(c_0 - c_t)) / (max(|l_t|, e^-m) +
// eps) C' = C exp(c_0 - c_L) + sum_j exp(w_j - c_L) k_j v_j^T;  the gradients are in the same two
// passes.
//
// First the gates of all steps, a simdgroup per head. Then the states before each chunk of STEPS
// steps, 8 x 32 values in the registers of a simdgroup. Then eight rows of the results per
// simdgroup: products with the state, and with the other steps of the chunk. Nothing is shared, so
// there is no barrier, and each sum has one order.

#include "float_pairs.h"
#include "gates.h"
#include "mlstm.h"

constant int kColumns = 4;

inline bool is_more(two_floats a, two_floats b) {
  return a.high > b.high || (a.high == b.high && a.low > b.low);
}

// The largest of all lanes before this one, and of `first`.
inline two_floats largest_before(two_floats x, two_floats first, uint lane) {
  two_floats found = first;
  for (ushort other = 0; other < 31; ++other) {
    const two_floats y = {simd_shuffle(x.high, other), simd_shuffle(x.low, other)};
    if (other < lane && is_more(y, found)) {
      found = y;
    }
  }
  return found;
}

inline two_floats sum_before(two_floats x, uint lane) {
  two_floats found = {0.0f, 0.0f};
  for (ushort other = 0; other < 31; ++other) {
    const two_floats y = {simd_shuffle(x.high, other), simd_shuffle(x.low, other)};
    if (other < lane) {
      found = added(found, y);
    }
  }
  return found;
}

// One simdgroup per head of a sequence; each lane takes a run of steps.
template <typename G, int STEPS, bool SIGMOID, bool PACKED>
[[max_total_threads_per_threadgroup(32)]] kernel void mlstm_gates(
    device const G* i [[buffer(0)]],
    device const G* f [[buffer(1)]],
    device const float* m0 [[buffer(2)]],
    device const int* starts [[buffer(3)]],
    device float2* w [[buffer(4)]],
    device float2* c [[buffer(5)]],
    device float* m [[buffer(6)]],
    device float* m_last [[buffer(7)]],
    constant long* size [[buffer(8)]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  const mlstm_sizes s = {size};
  const mlstm_sequence here =
      sequence_of<STEPS, PACKED>(s, starts, group / s.heads(), group % s.heads());
  const uint steps = uint(here.steps);
  const uint run = (steps + 31) / 32;
  const uint first = min(steps, lane * run);
  const uint end = min(steps, first + run);
  i += here.first;
  f += here.first;
  w += here.first;
  c += here.first;
  m += here.first;
  two_floats total = {0.0f, 0.0f};
  for (uint t = first; t < end; ++t) {
    total = added(total, {log_sigmoid(float(f[t])), 0.0f});
  }
  const two_floats before = sum_before(total, lane);
  total = before;
  two_floats most = {-INFINITY, 0.0f};
  for (uint t = first; t < end; ++t) {
    total = added(total, {log_sigmoid(float(f[t])), 0.0f});
    const float write = SIGMOID ? log_sigmoid(float(i[t])) : float(i[t]);
    const two_floats own = added({write, 0.0f}, {-total.high, -total.low});
    w[t] = float2(own.high, own.low);
    most = is_more(own, most) ? own : most;
  }
  most = largest_before(most, {m0[here.state], 0.0f}, lane);
  total = before;
  for (uint t = first; t < end; ++t) {
    total = added(total, {log_sigmoid(float(f[t])), 0.0f});
    const two_floats own = {w[t].x, w[t].y};
    most = is_more(own, most) ? own : most;
    const two_floats scale = SIGMOID ? two_floats{-total.high, -total.low} : most;
    c[t] = float2(scale.high, scale.low);
    m[t] = SIGMOID ? 0.0f : added(total, most).high;
  }
  if (first < end && end == steps) {
    m_last[here.state] = m[steps - 1];
  }
  if (steps == 0 && lane == 0) {
    m_last[here.state] = m0[here.state];
  }
}

// The states before each chunk, and after the last; or their gradients, from the last one on.
// left: k or q. right: v or dh. states: [heads, slots, D, E + 1]. c_end, n_end: where it ends.
template <typename T, int STEPS, int SIMDGROUPS, bool GRADIENT, bool PACKED>
[[max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] kernel void mlstm_states(
    device const T* left [[buffer(0)]],
    device const T* right [[buffer(1)]],
    device const float* share [[buffer(2)]],
    device const float* dl [[buffer(3)]],
    device const float2* w [[buffer(4)]],
    device const float2* c [[buffer(5)]],
    device const float* m0 [[buffer(6)]],
    device const float* c0 [[buffer(7)]],
    device const float* n0 [[buffer(8)]],
    device const int* starts [[buffer(9)]],
    device float* states [[buffer(10)]],
    device float* c_end [[buffer(11)]],
    device float* n_end [[buffer(12)]],
    constant long* size [[buffer(13)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const mlstm_sizes s = {size};
  const int row = int(group.x * SIMDGROUPS + simdgroup) * 8;
  const int column = int(group.y) * 8 * kColumns;
  if (row >= s.head()) {
    return;
  }
  const mlstm_sequence here =
      sequence_of<STEPS, PACKED>(s, starts, group.z / s.heads(), group.z % s.heads());
  const uint2 place = place_in_tile(lane);
  const int D = s.head(), E = s.values();
  const int d = row + int(place.y);
  const float root = GRADIENT ? precise::rsqrt(float(D)) : 1.0f;
  left += here.first * uint(D);
  right += here.first * uint(E);
  share += here.first;
  dl += here.first;
  w += here.first;
  c += here.first;
  states += here.slot * s.state();
  // of this thread's row, in states as they are given
  const ulong given = here.state * uint(D) + uint(d);

  simdgroup_float8x8 sums[kColumns];
#pragma unroll
  for (int x = 0; x < kColumns; ++x) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int at = column + x * 8 + int(place.x) + e;
      float value = 0.0f;
      if (d < D && at < E) {
        value = c0[given * uint(E) + uint(at)];
      }
      if (d < D && at == E) {
        value = n0[given];
      }
      sums[x].thread_elements()[e] = value;
    }
  }
  for (int turn = 0; turn <= here.chunks; ++turn) {
    const int chunk = GRADIENT ? here.chunks - turn : turn;
    const bool is_end = turn == here.chunks;
    device float* to = states + ulong(chunk) * s.state();
#pragma unroll
    for (int x = 0; x < kColumns; ++x) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = column + x * 8 + int(place.x) + e;
        const float value = sums[x].thread_elements()[e];
        if (d < D && at <= E) {
          to[ulong(d) * uint(E + 1) + uint(at)] = value;
        }
        if (is_end && d < D && at < E) {
          c_end[given * uint(E) + uint(at)] = value;
        }
        if (is_end && d < D && at == E) {
          n_end[given] = value;
        }
      }
    }
    if (is_end) {
      return;
    }
    const int first = (GRADIENT ? chunk - 1 : chunk) * STEPS;
    const int count = min(STEPS, here.steps - first);
    const chunk_gates gates = gates_of(w, c, m0[here.state], first, count);
    const chunk_rows<T> rows = {left + ulong(first) * uint(D), count, D};
    const chunk_rows<T> with = {right + ulong(first) * uint(E), count, E};
    const values_and_ones<T> values = {with};
    const shared_gradients<T> gradients = {with, share + first, dl + first};
    const float kept = gates.kept();
#pragma unroll
    for (int x = 0; x < kColumns; ++x) {
      sums[x].thread_elements()[0] *= kept;
      sums[x].thread_elements()[1] *= kept;
    }
    for (int t = 0; t < count; t += 8) {
      simdgroup_float8x8 a = turned_tile_of(rows, t, row, place);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int step = t + int(place.x) + e;
        a.thread_elements()[e] *= GRADIENT ? gates.from_start(step) * root : gates.to_end(step);
      }
#pragma unroll
      for (int x = 0; x < kColumns; ++x) {
        const int at = column + x * 8;
        const simdgroup_float8x8 b =
            GRADIENT ? tile_of(gradients, t, at, place) : tile_of(values, t, at, place);
        simdgroup_multiply_accumulate(sums[x], a, b, sums[x]);
      }
    }
  }
}

// What eight steps have as divisors: l, from their pairs and the state.
template <typename T, int STEPS>
inline float products_of(
    thread simdgroup_float8x8* pairs,
    chunk_rows<T> q,
    device const float* state,
    mlstm_sizes s,
    int row,
    chunk_gates gates,
    float root,
    uint2 place) {
  float of_state = 0.0f;
  for (int d = 0; d < s.head(); d += 8) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int at = d + int(place.x) + e;
      if (at < s.head()) {
        const float n = state[ulong(at) * uint(s.values() + 1) + uint(s.values())];
        of_state = fma(q.at(row + int(place.y), at), n, of_state);
      }
    }
  }
  float sum = of_state * gates.from_start(row + int(place.y)) * root;
#pragma unroll
  for (int p = 0; p < STEPS / 8; ++p) {
    sum += pairs[p].thread_elements()[0] + pairs[p].thread_elements()[1];
  }
  return row_sum(sum);
}

template <typename T, int STEPS, int SIMDGROUPS, bool NORMALIZE, bool PACKED>
// mslsim: allow(code): tiles are multiplied in registers, which takes constant indices
[[max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] kernel void mlstm_output(
    device const T* q [[buffer(0)]],
    device const T* k [[buffer(1)]],
    device const T* v [[buffer(2)]],
    device const float2* w [[buffer(3)]],
    device const float2* c [[buffer(4)]],
    device const float* m [[buffer(5)]],
    device const float* m0 [[buffer(6)]],
    device const float* states [[buffer(7)]],
    device const int* starts [[buffer(8)]],
    device T* h [[buffer(9)]],
    constant long* size [[buffer(10)]],
    constant float& eps [[buffer(11)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const mlstm_sizes s = {size};
  const mlstm_tile here =
      tile_at<STEPS, PACKED>(s, starts, group.x * SIMDGROUPS + simdgroup, group.y);
  const int row = here.row;
  const int count = min(STEPS, here.of.steps - here.start);
  if (row >= count) {
    return;
  }
  const uint2 place = place_in_tile(lane);
  const int D = s.head(), E = s.values();
  const ulong first = here.of.first, from = here.from();
  const chunk_gates gates = gates_of(w + first, c + first, m0[here.of.state], here.start, count);
  const chunk_rows<T> queries = {q + from * uint(D), count, D};
  const chunk_rows<T> keys = {k + from * uint(D), count, D};
  const chunk_rows<T> values = {v + from * uint(E), count, E};
  device const float* state = states + (here.of.slot + uint(here.chunk)) * s.state();
  const chunk_rows<float> memory = {state, D, E + 1};
  const float root = precise::rsqrt(float(D));
  const int t = row + int(place.y);
  const float kept = gates.from_start(t) * root;

  simdgroup_float8x8 pairs[STEPS / 8];
  weigh_pairs<true, STEPS / 8>(pairs, queries, keys, D, row, gates, root, place);
  float divisor = 1.0f;
  if (NORMALIZE) {
    const float l = products_of<T, STEPS>(pairs, queries, state, s, row, gates, root, place);
    const float least = t < count ? precise::exp(-m[from + uint(t)]) : 1.0f;
    divisor = max(abs(l), least) + eps;
  }
  // in memory [entries, steps, heads, E]
  const ulong line = here.line(s, t);
  for (int column = 0; column < E; column += 8 * kColumns) {
    simdgroup_float8x8 sums[kColumns];
#pragma unroll
    for (int x = 0; x < kColumns; ++x) {
      sums[x] = simdgroup_float8x8(0.0f);
    }
    for (int d = 0; d < D; d += 8) {
      simdgroup_float8x8 a = tile_of(queries, row, d, place);
      a.thread_elements()[0] *= kept;
      a.thread_elements()[1] *= kept;
#pragma unroll
      for (int x = 0; x < kColumns; ++x) {
        const simdgroup_float8x8 b = tile_of(memory, d, column + x * 8, place);
        simdgroup_multiply_accumulate(sums[x], a, b, sums[x]);
      }
    }
#pragma unroll
    for (int p = 0; p < STEPS / 8; ++p) {
      if (p * 8 <= row) {
#pragma unroll
        for (int x = 0; x < kColumns; ++x) {
          const simdgroup_float8x8 b = tile_of(values, p * 8, column + x * 8, place);
          simdgroup_multiply_accumulate(sums[x], pairs[p], b, sums[x]);
        }
      }
    }
#pragma unroll
    for (int x = 0; x < kColumns; ++x) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = column + x * 8 + int(place.x) + e;
        if (t < count && at < E) {
          h[line * uint(E) + uint(at)] = T(sums[x].thread_elements()[e] / divisor);
        }
      }
    }
  }
}
