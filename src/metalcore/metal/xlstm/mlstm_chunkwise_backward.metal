// SPDX-License-Identifier: MIT
// With u = dh / R and P[t][j] = s (u_t v_j + dl_t) exp(w_j - c_t):
//   dq = P K + s kept (u C^T + dl n),  dk = P^T Q + Abar (dC v + dn),  dv = A^T U + Abar k dC
// Of the gates dw_j = k_j dk_j, and dF_t = q_t dq_t - dw_t + dm_t, dm_t = -(dh_t h_t) eps / R_t,
// which goes on to the step that c_t is of. Sums over time start anew at each chunk, from the
// product of the state after it and that state's gradient, and are of two floats.
//
// A simdgroup takes eight rows of one result, as in the forward pass; there is no barrier but in
// sums over a whole state.

#include "float_pairs.h"
#include "gates.h"
#include "mlstm.h"
#include "reduce.h"

constant int kColumns = 4;

// A row's part of the gradient: 1 / R and dl, and dm.
template <
    typename T,
    int STEPS,
    int SIMDGROUPS,
    bool NORMALIZE,
    bool EXACT,
    bool SIGMOID,
    bool PACKED>
// mslsim: allow(code): tiles are multiplied in registers, which takes constant indices
[[max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] kernel void mlstm_rows(
    device const T* q [[buffer(0)]],
    device const T* k [[buffer(1)]],
    device const T* v [[buffer(2)]],
    device const T* dh [[buffer(3)]],
    device const float2* w [[buffer(4)]],
    device const float2* c [[buffer(5)]],
    device const float* m [[buffer(6)]],
    device const float* m0 [[buffer(7)]],
    device const float* states [[buffer(8)]],
    device const int* starts [[buffer(9)]],
    device float* share [[buffer(10)]],
    device float* dl [[buffer(11)]],
    device float* dm [[buffer(12)]],
    constant long* size [[buffer(13)]],
    constant float& eps [[buffer(14)]],
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
  const values_and_ones<T> values = {{v + from * uint(E), count, E}};
  const chunk_rows<T> gradients = {dh + from * uint(E), count, E};
  const chunk_rows<float> memory = {
      states + (here.of.slot + uint(here.chunk)) * s.state(), D, E + 1};
  const float root = precise::rsqrt(float(D));
  const int t = row + int(place.y);
  const float kept = gates.from_start(t) * root;

  simdgroup_float8x8 pairs[STEPS / 8];
  weigh_pairs<true, STEPS / 8>(pairs, queries, keys, D, row, gates, root, place);
  // what the query reads, and l in the column behind it
  float l = 0.0f;
  float delta = 0.0f;
  for (int column = 0; column <= E; column += 8) {
    simdgroup_float8x8 sum = simdgroup_float8x8(0.0f);
    for (int d = 0; d < D; d += 8) {
      simdgroup_float8x8 a = tile_of(queries, row, d, place);
      a.thread_elements()[0] *= kept;
      a.thread_elements()[1] *= kept;
      simdgroup_multiply_accumulate(sum, a, tile_of(memory, d, column, place), sum);
    }
#pragma unroll
    for (int p = 0; p < STEPS / 8; ++p) {
      if (p * 8 <= row) {
        simdgroup_multiply_accumulate(sum, pairs[p], tile_of(values, p * 8, column, place), sum);
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int at = column + int(place.x) + e;
      const float value = sum.thread_elements()[e];
      l += at == E ? value : 0.0f;
      delta = fma(value, gradients.at(t, at), delta);
    }
  }
  l = row_sum(l);
  delta = row_sum(delta);
  if (t < count && place.x == 0) {
    const float least = precise::exp(-m[from + uint(t)]);
    const float part = NORMALIZE ? 1.0f / (max(abs(l), least) + eps) : 1.0f;
    const float both = EXACT && NORMALIZE ? delta * part * part : 0.0f;
    share[from + uint(t)] = part;
    dl[from + uint(t)] = abs(l) > least ? (l < 0.0f ? both : -both) : 0.0f;
    dm[from + uint(t)] = SIGMOID ? 0.0f : -both * eps;
  }
}

// Eight rows of a result: dq (0), dk (1) or dv (2), and of the first two their products with q or
// k. states: C for dq, dC of the states after the chunks for the others.
template <typename T, int RESULT, int STEPS, int SIMDGROUPS, bool PACKED>
// mslsim: allow(code): tiles are multiplied in registers, which takes constant indices
[[max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] kernel void mlstm_gradient(
    device const T* q [[buffer(0)]],
    device const T* k [[buffer(1)]],
    device const T* v [[buffer(2)]],
    device const T* dh [[buffer(3)]],
    device const float* share [[buffer(4)]],
    device const float* dl [[buffer(5)]],
    device const float2* w [[buffer(6)]],
    device const float2* c [[buffer(7)]],
    device const float* m0 [[buffer(8)]],
    device const float* states [[buffer(9)]],
    device const int* starts [[buffer(10)]],
    device T* result [[buffer(11)]],
    device float* products [[buffer(12)]],
    constant long* size [[buffer(13)]],
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
  const values_and_ones<T> values = {{v + from * uint(E), count, E}};
  const shared_gradients<T> gradients = {{dh + from * uint(E), count, E}, share + from, dl + from};
  const chunk_rows<float> memory = {
      states + (here.of.slot + uint(here.chunk + (RESULT == 0 ? 0 : 1))) * s.state(), D, E + 1};
  const float root = precise::rsqrt(float(D));
  const int own = row + int(place.y);
  const float factor = RESULT == 0 ? gates.from_start(own) * root : gates.to_end(own);

  simdgroup_float8x8 pairs[STEPS / 8];
  if (RESULT == 0) {
    weigh_pairs<true, STEPS / 8>(pairs, gradients, values, E + 1, row, gates, root, place);
  } else if (RESULT == 1) {
    weigh_pairs<false, STEPS / 8>(pairs, values, gradients, E + 1, row, gates, root, place);
  } else {
    weigh_pairs<false, STEPS / 8>(pairs, keys, queries, D, row, gates, root, place);
  }
  const int columns = RESULT == 2 ? E : D;
  const int depth = RESULT == 2 ? D : E + 1;
  const ulong line = here.line(s, own);
  float product = 0.0f;
  for (int column = 0; column < columns; column += 8 * kColumns) {
    simdgroup_float8x8 sums[kColumns];
#pragma unroll
    for (int x = 0; x < kColumns; ++x) {
      sums[x] = simdgroup_float8x8(0.0f);
    }
    for (int d = 0; d < depth; d += 8) {
      simdgroup_float8x8 a = RESULT == 0   ? tile_of(gradients, row, d, place)
                             : RESULT == 1 ? tile_of(values, row, d, place)
                                           : tile_of(keys, row, d, place);
      a.thread_elements()[0] *= factor;
      a.thread_elements()[1] *= factor;
#pragma unroll
      for (int x = 0; x < kColumns; ++x) {
        const int at = column + x * 8;
        const simdgroup_float8x8 b =
            RESULT == 2 ? tile_of(memory, d, at, place) : turned_tile_of(memory, at, d, place);
        simdgroup_multiply_accumulate(sums[x], a, b, sums[x]);
      }
    }
#pragma unroll
    for (int p = 0; p < STEPS / 8; ++p) {
      if (RESULT == 0 ? p * 8 <= row : p * 8 >= row && p * 8 < count) {
#pragma unroll
        for (int x = 0; x < kColumns; ++x) {
          const int at = column + x * 8;
          const simdgroup_float8x8 b = RESULT == 0   ? tile_of(keys, p * 8, at, place)
                                       : RESULT == 1 ? tile_of(queries, p * 8, at, place)
                                                     : tile_of(gradients, p * 8, at, place);
          simdgroup_multiply_accumulate(sums[x], pairs[p], b, sums[x]);
        }
      }
    }
#pragma unroll
    for (int x = 0; x < kColumns; ++x) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = column + x * 8 + int(place.x) + e;
        const float value = sums[x].thread_elements()[e];
        if (own < count && at < columns) {
          result[line * uint(columns) + uint(at)] = T(value);
          if (RESULT != 2) {
            product = fma(value, RESULT == 0 ? queries.at(own, at) : keys.at(own, at), product);
          }
        }
      }
    }
  }
  if (RESULT != 2) {
    product = row_sum(product);
    if (own < count && place.x == 0) {
      products[from + uint(own)] = product;
    }
  }
}

// The product of each state and its gradient; one threadgroup for one of them.
template <int STEPS, int THREADS, bool PACKED>
[[max_total_threads_per_threadgroup(THREADS)]] kernel void mlstm_inner(
    device const float* states [[buffer(0)]],
    device const float* gradients [[buffer(1)]],
    device const int* starts [[buffer(2)]],
    device float* inner [[buffer(3)]],
    constant long* size [[buffer(4)]],
    uint state [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float scratch[32];
  const mlstm_sizes s = {size};
  if (PACKED) {
    // not every slot has a state
    const uint n = sequence_at<STEPS>(s, starts, state % s.slots(), 2);
    const mlstm_sequence here = sequence_of<STEPS, PACKED>(s, starts, n, state / s.slots());
    if (state > here.slot + uint(here.chunks)) {
      return;
    }
  }
  const uint values = uint(s.state());
  states += ulong(state) * values;
  gradients += ulong(state) * values;
  float sum = 0.0f;
  for (uint x = thread_index; x < values; x += THREADS) {
    sum = fma(states[x], gradients[x], sum);
  }
  sum = threadgroup_sum(sum, scratch, thread_index, THREADS);
  if (thread_index == 0) {
    inner[state] = sum;
  }
}

// One simdgroup per head of a sequence; each lane takes a run of chunks, from the last step on.
template <typename G, int STEPS, bool EXACT, bool SIGMOID, bool PACKED>
[[max_total_threads_per_threadgroup(32)]] kernel void mlstm_gate_gradients(
    device const G* i [[buffer(0)]],
    device const G* f [[buffer(1)]],
    device const float2* c [[buffer(2)]],
    device const float* m0 [[buffer(3)]],
    device const float* of_q [[buffer(4)]],
    device const float* of_k [[buffer(5)]],
    device const float* of_m [[buffer(6)]],
    device const float* inner [[buffer(7)]],
    device const float* dm_last [[buffer(8)]],
    device const int* starts [[buffer(9)]],
    device G* di [[buffer(10)]],
    device G* df [[buffer(11)]],
    device float* dm [[buffer(12)]],
    constant long* size [[buffer(13)]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  const mlstm_sizes s = {size};
  const mlstm_sequence here =
      sequence_of<STEPS, PACKED>(s, starts, group / s.heads(), group % s.heads());
  const bool has_m = EXACT && !SIGMOID;
  const int steps = here.steps;
  const int run = (here.chunks + 31) / 32 * STEPS;
  const int first = min(steps, int(lane) * run);
  const int end = min(steps, first + run);
  i += here.first;
  f += here.first;
  c += here.first;
  of_q += here.first;
  of_k += here.first;
  of_m += here.first;
  di += here.first;
  df += here.first;
  inner += here.slot;
  const float2 initial = float2(m0[here.state], 0.0f);

  // dm of the steps before the first one here that c is of, all of them where there is none
  bool is_taken = false;
  two_floats left = {0.0f, 0.0f};
  for (int t = first; t < end && has_m && !is_taken; ++t) {
    const float2 before = t == 0 ? initial : c[t - 1];
    is_taken = c[t].x != before.x || c[t].y != before.y;
    if (!is_taken) {
      left = added(left, {of_m[t], 0.0f});
    }
  }
  two_floats carried = {0.0f, 0.0f};
  if (has_m) {
    carried = two_sum(dm_last[here.state], -inner[here.chunks]);
  }
  two_floats mine = carried;
  for (short other = 31; other >= 0; --other) {
    const two_floats theirs = {
        simd_shuffle(left.high, ushort(other)), simd_shuffle(left.low, ushort(other))};
    const bool taken = simd_shuffle(is_taken ? 1 : 0, ushort(other)) != 0;
    mine = short(lane) == other ? carried : mine;
    carried = taken ? theirs : added(carried, theirs);
  }
  if (lane == 0) {
    dm[here.state] = carried.high + inner[0];
  }
  carried = mine;
  two_floats sum = {0.0f, 0.0f};
  for (int t = end - 1; t >= first; --t) {
    if (t == steps - 1 || (t + 1) % STEPS == 0) {
      sum = added(carried, {inner[t / STEPS + 1], 0.0f});
    }
    const float here = has_m ? of_m[t] : 0.0f;
    two_floats dw = {of_k[t], 0.0f};
    sum = added(sum, two_sum(of_q[t], here));
    if (has_m) {
      carried = added(carried, {here, 0.0f});
      const float2 before = t == 0 ? initial : c[t - 1];
      if (c[t].x != before.x || c[t].y != before.y) {
        dw = added(dw, carried);
        carried = {0.0f, 0.0f};
      }
    }
    sum = added(sum, {-dw.high, -dw.low});
    const float slope_i = SIGMOID ? 1.0f / (1.0f + precise::exp(float(i[t]))) : 1.0f;
    di[t] = G(dw.high * slope_i);
    df[t] = G(sum.high / (1.0f + precise::exp(float(f[t]))));
  }
}
