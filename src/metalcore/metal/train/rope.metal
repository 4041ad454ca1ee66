// SPDX-License-Identifier: MIT
// y[j] = x[j] * cos[j] + sign(j) * x[partner(j)] * sin[j],  j < rotary;  y[j] = x[j] past it
//
// One thread per unit of a row and position: WIDTH values and their partners. It keeps their
// cosines and sines, and turns a run of heads by them, of q or of k. Runs are counted through,
// those of k after those of q. Lengths, strides (of batch, head and position) and tables are in
// chunks of WIDTH values. Split-half: the partner is `half` chunks away; interleaved: the
// neighbour. HALF: partners share a value of the table. A row that is not there gives NaN.

#include "chunk.h"

inline float4 neighbours(float4 v) { return v.yxwz; }

// Interleaved partners of the chunk v = row[i].
template <typename T>
inline float4 partners(float4 v, device const vec<T, 4>* row, uint i) {
  return neighbours(v);
}

template <typename T>
inline float partners(float v, device const T* row, uint i) {
  return float(row[i ^ 1]);
}

// Cosines or sines of chunk i, interleaved.
template <bool HALF, typename T>
inline float table_at(float, device const T* row, uint i) {
  return float(row[HALF ? i / 2 : i]);
}

template <bool HALF, typename T>
inline float4 table_at(float4, device const vec<T, 4>* row, uint i) {
  if (!HALF) {
    return float4(row[i]);
  }
  const float4 v = float4(row[i / 2]);
  return i % 2 == 0 ? v.xxyy : v.zzww;
}

// The sign of the sine at chunk i, interleaved.
inline float4 signs(float4, uint) { return float4(-1.0f, 1.0f, -1.0f, 1.0f); }
inline float signs(float, uint i) { return i % 2 == 0 ? -1.0f : 1.0f; }

template <
    typename T,
    typename W,
    int WIDTH,
    bool INTERLEAVED,
    bool HALF,
    bool POSITIONS,
    bool INVERSE>
[[max_total_threads_per_threadgroup(512)]] kernel void rope(
    device const typename chunk<T, WIDTH>::stored* q [[buffer(0)]],
    device const typename chunk<T, WIDTH>::stored* k [[buffer(1)]],
    device const typename chunk<W, WIDTH>::stored* cos [[buffer(2)]],
    device const typename chunk<W, WIDTH>::stored* sin [[buffer(3)]],
    device const long* positions [[buffer(4)]],
    device typename chunk<T, WIDTH>::stored* q_out [[buffer(5)]],
    device typename chunk<T, WIDTH>::stored* k_out [[buffer(6)]],
    constant uint& length [[buffer(7)]],
    constant uint& q_heads [[buffer(8)]],
    constant uint& k_heads [[buffer(9)]],
    constant uint& heads_per_run [[buffer(10)]],
    constant uint& q_runs [[buffer(11)]],
    constant uint& runs [[buffer(12)]],
    constant uint& size [[buffer(13)]],
    constant uint& half_size [[buffer(14)]],
    constant uint& entries_batch [[buffer(15)]],
    constant uint& rows [[buffer(16)]],
    constant uint& row_size [[buffer(17)]],
    constant long* q_strides [[buffer(18)]],
    constant long* k_strides [[buffer(19)]],
    constant long* q_out_strides [[buffer(20)]],
    constant long* k_out_strides [[buffer(21)]],
    uint3 at [[thread_position_in_grid]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  const uint unit = at.x;
  const uint position = at.y;
  if (unit >= (INTERLEAVED ? size : size - half_size) || position >= length) {
    return;
  }
  const uint batch = at.z / runs;
  const uint run = at.z - batch * runs;
  const bool turns = unit < (INTERLEAVED ? 2 * half_size : half_size);
  const uint other = unit + half_size;

  // of the unit, and (split-half) of its partners
  wide c = wide(NAN);
  wide s = wide(NAN);
  wide c_other = wide(NAN);
  wide s_other = wide(NAN);
  const uint entry = batch * entries_batch + position;
  const long row = POSITIONS ? positions[entry] : long(entry);
  if (turns && row >= 0 && row < long(rows)) {
    cos += ulong(row) * row_size;
    sin += ulong(row) * row_size;
    if (INTERLEAVED) {
      c = table_at<HALF>(c, cos, unit);
      s = table_at<HALF>(s, sin, unit);
      if (INVERSE) {
        s = HALF ? -s : -partners(s, sin, unit);
      }
      s *= signs(s, unit);
    } else {
      c = wide(cos[unit]);
      c_other = HALF ? c : wide(cos[other]);
      const wide first = wide(sin[unit]);
      const wide second = HALF ? first : wide(sin[other]);
      s = INVERSE ? second : -first;
      s_other = INVERSE ? -first : second;
    }
  }

  const bool is_q = run < q_runs;
  const uint head = (is_q ? run : run - q_runs) * heads_per_run;
  const uint last = min(is_q ? q_heads : k_heads, head + heads_per_run);
  constant long* from = is_q ? q_strides : k_strides;
  constant long* to = is_q ? q_out_strides : k_out_strides;
  device const stored* x = is_q ? q : k;
  device stored* y = is_q ? q_out : k_out;
  const uint x_step = uint(from[1]);
  const uint y_step = uint(to[1]);
  x += ulong(batch) * uint(from[0]) + ulong(head) * x_step + ulong(position) * uint(from[2]);
  y += ulong(batch) * uint(to[0]) + ulong(head) * y_step + ulong(position) * uint(to[2]);
  for (uint h = head; h < last; ++h) {
    if (!turns) {
      const uint i = INTERLEAVED ? unit : other;
      y[i] = x[i];
    } else if (INTERLEAVED) {
      const wide v = wide(x[unit]);
      y[unit] = stored(v * c + partners(v, x, unit) * s);
    } else {
      const wide a = wide(x[unit]);
      const wide b = wide(x[other]);
      y[unit] = stored(a * c + b * s);
      y[other] = stored(b * c_other + a * s_other);
    }
    x += x_step;
    y += y_step;
  }
}
