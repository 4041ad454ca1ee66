// SPDX-License-Identifier: MIT
// The nodes of a tape. Numbers between them are float32, a row of a buffer for each token; `from`
// and `to` are how far rows are apart. Kernels start at the first value that they touch.

#include "activation.h"

// y[m, i] = scale * table[tokens[m], i]. The grid is n x tokens.
template <typename T>
[[max_total_threads_per_threadgroup(512)]] kernel void decode_embed(
    device const T* table [[buffer(0)]],
    device const long* tokens [[buffer(1)]],
    device float* y [[buffer(2)]],
    constant uint& n [[buffer(3)]],
    constant uint& to [[buffer(4)]],
    constant uint& vocabulary [[buffer(5)]],
    constant float& scale [[buffer(6)]],
    uint2 at [[thread_position_in_grid]]) {
  const uint token = min(uint(tokens[at.y]), vocabulary - 1);
  y[at.y * to + at.x] = scale * float(table[ulong(token) * n + at.x]);
}

// y = (before +) scale * (x + bias). The grid is n x tokens; `before` is y.
template <bool BIAS, bool ADD>
[[max_total_threads_per_threadgroup(512)]] kernel void decode_put(
    device const float* x [[buffer(0)]],
    device const float* bias [[buffer(1)]],
    device const float* before [[buffer(2)]],
    device float* y [[buffer(3)]],
    constant uint& from [[buffer(4)]],
    constant uint& to [[buffer(5)]],
    constant float& scale [[buffer(6)]],
    uint2 at [[thread_position_in_grid]]) {
  float value = x[at.y * from + at.x];
  if (BIAS) {
    value += bias[at.x];
  }
  const uint place = at.y * to + at.x;
  y[place] = ADD ? before[place] + scale * value : scale * value;
}

// y = cap * tanh(x / cap). The grid is n x tokens; y may be x.
[[max_total_threads_per_threadgroup(512)]] kernel void decode_cap(
    device const float* x [[buffer(0)]],
    device float* y [[buffer(1)]],
    constant uint& from [[buffer(2)]],
    constant uint& to [[buffer(3)]],
    constant float& cap [[buffer(4)]],
    uint2 at [[thread_position_in_grid]]) {
  y[at.y * to + at.x] = precise::tanh(x[at.y * from + at.x] / cap) * cap;
}

// y = act(x) * z. The grid is n x tokens; y may be x.
template <typename ACT>
[[max_total_threads_per_threadgroup(512)]] kernel void decode_glu(
    device const float* x [[buffer(0)]],
    device const float* z [[buffer(1)]],
    device float* y [[buffer(2)]],
    constant uint& from [[buffer(3)]],
    constant uint& from_z [[buffer(4)]],
    constant uint& to [[buffer(5)]],
    uint2 at [[thread_position_in_grid]]) {
  const float gate = x[at.y * from + at.x];
  y[at.y * to + at.x] = ACT::value(gate) * z[at.y * from_z + at.x];
}

// y = x / sqrt(mean(x^2) + eps) * weight. One simdgroup for each of `times` slices of n values of
// each token; y may be x.
template <bool WEIGHT>
[[max_total_threads_per_threadgroup(32)]] kernel void decode_norm(
    device const float* x [[buffer(0)]],
    device const float* weight [[buffer(1)]],
    device float* y [[buffer(2)]],
    constant uint& n [[buffer(3)]],
    constant uint& from [[buffer(4)]],
    constant uint& to [[buffer(5)]],
    constant float& eps [[buffer(6)]],
    uint2 at [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  x += at.y * from + at.x * n;
  y += at.y * to + at.x * n;
  float sum = 0.0f;
  for (uint i = lane; i < n; i += 32) {
    sum += x[i] * x[i];
  }
  const float r = precise::rsqrt(simd_sum(sum) / float(n) + eps);
  for (uint i = lane; i < n; i += 32) {
    y[i] = x[i] * r * (WEIGHT ? weight[i] : 1.0f);
  }
}

// y = (before +) scale * (x W^T + bias), for up to ROWS tokens; `before` is y. One simdgroup for
// each output.
template <typename T, int ROWS, bool BIAS, bool ADD, int SIMDGROUPS>
[[max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] kernel void decode_linear(
    device const float* x [[buffer(0)]],
    device const T* weight [[buffer(1)]],
    device const float* bias [[buffer(2)]],
    device const float* before [[buffer(3)]],
    device float* y [[buffer(4)]],
    constant uint& rows [[buffer(5)]],
    constant uint& n [[buffer(6)]],
    constant uint& k [[buffer(7)]],
    constant uint& from [[buffer(8)]],
    constant uint& to [[buffer(9)]],
    constant float& scale [[buffer(10)]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint column = group * SIMDGROUPS + simdgroup;
  if (column >= n) {
    return;
  }
  weight += ulong(column) * k;
  float sums[ROWS] = {};
  for (uint i = lane; i < k; i += 32) {
    const float w = float(weight[i]);
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
      sums[m] += uint(m) < rows ? w * x[m * from + i] : 0.0f;
    }
  }
#pragma unroll
  for (int m = 0; m < ROWS; ++m) {
    float value = simd_sum(sums[m]);
    if (lane == 0 && uint(m) < rows) {
      if (BIAS) {
        value += bias[column];
      }
      const uint place = m * to + column;
      y[place] = ADD ? before[place] + scale * value : scale * value;
    }
  }
}

// Pairs of values of a head that turn together, by a row of cosines and one of signed sines.
template <bool INTERLEAVED>
struct Turn {
  device const float* x;
  device const float* table;
  uint count;
  uint width;

  uint first(uint i) const { return INTERLEAVED ? 2 * i : i; }
  uint second(uint i) const { return INTERLEAVED ? 2 * i + 1 : i + count; }

  float2 pair(uint i) const {
    const uint a = first(i), b = second(i), c = INTERLEAVED ? b : width / 2 + i;
    const float xa = x[a], xb = x[b];
    return float2(xa * table[a] + xb * table[width + a], xb * table[c] + xa * table[width + c]);
  }
};

// A number as S; one of 8 bits is the nearest to x / scale, where scale is that of a whole head.
template <typename S, bool CODES>
S stored_as(float x, float scale) {
  if (!CODES) {
    return S(x);
  }
  const bool is_plain = scale > 0.0f && isfinite(scale);
  return S(is_plain ? rint(clamp(x / scale, -127.0f, 127.0f)) : 0.0f);
}

// Heads of queries are turned, `y` is `q`; those of keys are turned and written to the cache, and
// those of values written. One simdgroup for each head of each token, a pair of values per lane.
template <typename S, bool CODES, bool INTERLEAVED>
[[max_total_threads_per_threadgroup(32)]] kernel void decode_rope(
    device const float* q [[buffer(0)]],
    device const float* k [[buffer(1)]],
    device const float* v [[buffer(2)]],
    device float* y [[buffer(3)]],
    device const float* table [[buffer(4)]],
    device S* keys [[buffer(5)]],
    device S* values [[buffer(6)]],
    device float* k_scale [[buffer(7)]],
    device float* v_scale [[buffer(8)]],
    device const long* rows [[buffer(9)]],
    device const long* slots [[buffer(10)]],
    device const long* starts [[buffer(11)]],
    constant long* sizes [[buffer(12)]],
    uint2 at [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  const uint heads = uint(sizes[0]), key_heads = uint(sizes[1]), size = uint(sizes[2]);
  const uint rotary = uint(sizes[3]), width = uint(sizes[4]), room = uint(sizes[5]);
  const uint m = at.y, from_q = uint(sizes[6]), from_k = uint(sizes[7]), from_v = uint(sizes[8]);
  const uint row = uint(rows[m]), slot = uint(slots[m]), start = uint(starts[m]);
  const bool is_query = at.x < heads, is_key = !is_query && at.x < heads + key_heads;
  const uint head = is_query ? at.x : is_key ? at.x - heads : at.x - heads - key_heads;
  device const float* x = is_query ? q + m * from_q : is_key ? k + m * from_k : v + m * from_v;
  x += head * size;
  device float* own = y + m * from_q + head * size;
  const ulong vector = ulong(row * key_heads + head) * room + slot;
  device S* to = (is_key ? keys : values) + vector * size;
  const uint turned = is_query || is_key ? rotary : 0;
  const Turn<INTERLEAVED> turn = {x, table + ulong(slot - start) * 2 * width, turned / 2, width};
  if (is_query) {
    for (uint i = lane; i < turn.count; i += 32) {
      const float2 made = turn.pair(i);
      own[turn.first(i)] = made.x;
      own[turn.second(i)] = made.y;
    }
    return;
  }
  float scale = 1.0f;
  if (CODES) {
    float largest = 0.0f;
    bool is_nan = false;
    for (uint i = lane; i < turn.count; i += 32) {
      const float2 made = abs(turn.pair(i));
      is_nan = is_nan || isnan(made.x) || isnan(made.y);
      largest = max(largest, max(made.x, made.y));
    }
    for (uint i = turned + lane; i < size; i += 32) {
      is_nan = is_nan || isnan(x[i]);
      largest = max(largest, abs(x[i]));
    }
    scale = simd_any(is_nan) ? NAN : simd_max(largest) / 127.0f;
    if (lane == 0) {
      (is_key ? k_scale : v_scale)[vector] = scale;
    }
  }
  for (uint i = lane; i < turn.count; i += 32) {
    const float2 made = turn.pair(i);
    to[turn.first(i)] = stored_as<S, CODES>(made.x, scale);
    to[turn.second(i)] = stored_as<S, CODES>(made.y, scale);
  }
  for (uint i = turned + lane; i < size; i += 32) {
    to[i] = stored_as<S, CODES>(x[i], scale);
  }
}

// out = softmax(scale q k^T) v over the keys from starts[m], and at most `window` back, to
// slots[m]. One threadgroup for each head of each token: its simdgroups take every SIMDGROUPSth
// key, values of the head stand in the lanes, and the parts are merged. Codes of 8 bits are times
// the scale of their token and head.
template <typename S, bool CODES, int SIZE, bool CAP, bool SINKS, int SIMDGROUPS>
[[max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] kernel void decode_attend(
    device const float* q [[buffer(0)]],
    device const S* keys [[buffer(1)]],
    device const S* values [[buffer(2)]],
    device const float* k_scale [[buffer(3)]],
    device const float* v_scale [[buffer(4)]],
    device const float* sinks [[buffer(5)]],
    device float* out [[buffer(6)]],
    device const long* rows [[buffer(7)]],
    device const long* slots [[buffer(8)]],
    device const long* starts [[buffer(9)]],
    constant long* sizes [[buffer(10)]],
    constant float& scale [[buffer(11)]],
    constant float& cap [[buffer(12)]],
    uint2 at [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int EACH = (SIZE + 31) / 32;
  threadgroup float shared[SIMDGROUPS * (SIZE + 2)];
  const uint key_heads = uint(sizes[0]), group = uint(sizes[1]), room = uint(sizes[2]);
  const uint from = uint(sizes[3]), to = uint(sizes[4]), window = uint(sizes[5]);
  const uint head = at.x, m = at.y;
  const uint row = uint(rows[m]), slot = uint(slots[m]);
  uint first = uint(starts[m]);
  if (window > 0 && slot + 1 > window) {
    first = max(first, slot + 1 - window);
  }
  const ulong line = ulong(row * key_heads + head / group) * room;
  keys += line * SIZE;
  values += line * SIZE;
  q += m * from + head * SIZE;

  float query[EACH], sum[EACH];
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const uint i = e * 32 + lane;
    query[e] = i < uint(SIZE) ? q[i] * scale : 0.0f;
    sum[e] = 0.0f;
  }
  float largest = -INFINITY, total = 0.0f;
  for (uint key = first + simdgroup; key <= slot; key += SIMDGROUPS) {
    float score = 0.0f;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const uint i = e * 32 + lane;
      score += i < uint(SIZE) ? query[e] * float(keys[ulong(key) * SIZE + i]) : 0.0f;
    }
    score = simd_sum(score);
    if (CODES) {
      score *= k_scale[line + key];
    }
    if (CAP) {
      score = precise::tanh(score / cap) * cap;
    }
    const float next = max(largest, score);
    const float factor = precise::exp(largest - next), share = precise::exp(score - next);
    largest = next;
    total = total * factor + share;
    const float weight = CODES ? share * v_scale[line + key] : share;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const uint i = e * 32 + lane;
      const float value = i < uint(SIZE) ? float(values[ulong(key) * SIZE + i]) : 0.0f;
      sum[e] = sum[e] * factor + weight * value;
    }
  }
  threadgroup float* own = shared + simdgroup * (SIZE + 2);
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const uint i = e * 32 + lane;
    if (i < uint(SIZE)) {
      own[i] = sum[e];
    }
  }
  if (lane == 0) {
    own[SIZE] = largest;
    own[SIZE + 1] = total;
  }
  // the parts of all simdgroups are written
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float sink = SINKS ? sinks[head] : -INFINITY;
  float most = sink;
  for (int s = 0; s < SIMDGROUPS; ++s) {
    most = max(most, shared[s * (SIZE + 2) + SIZE]);
  }
  float all = SINKS ? precise::exp(sink - most) : 0.0f;
  for (int s = 0; s < SIMDGROUPS; ++s) {
    const float factor = precise::exp(shared[s * (SIZE + 2) + SIZE] - most);
    all += shared[s * (SIZE + 2) + SIZE + 1] * factor;
  }
  out += m * to + head * SIZE;
  for (uint i = simdgroup * 32 + lane; i < uint(SIZE); i += SIMDGROUPS * 32) {
    float value = 0.0f;
    for (int s = 0; s < SIMDGROUPS; ++s) {
      const float factor = precise::exp(shared[s * (SIZE + 2) + SIZE] - most);
      value += shared[s * (SIZE + 2) + i] * factor;
    }
    out[i] = value / all;
  }
}
