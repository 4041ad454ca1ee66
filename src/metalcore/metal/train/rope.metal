// SPDX-License-Identifier: MIT
// y[j] = x[j] * cos[j] + sign(j) * x[partner(j)] * sin[j],  j < rotary;  y[j] = x[j] past it
//
// One thread per unit of a row and position: WIDTH values and their partners. It keeps their
// cosines and sines, and turns a run of the heads of q and then k by them. Heads are counted
// through, those of k after those of q. Lengths, strides and tables are in chunks of WIDTH values;
// the results have no gaps. Split-half: the partner is `half` chunks away; interleaved: the
// neighbour. A row of the table that is not there gives NaN.

#include "chunk.h"

inline float4 neighbours(float4 v) { return v.yxwz; }

// Interleaved partners of the chunk v = row[i].
template <typename T>
inline float4 partners(float4 v, device const vec<T, 4>* row, long i) {
  return neighbours(v);
}

template <typename T>
inline float partners(float v, device const T* row, long i) {
  return float(row[i ^ 1]);
}

// The sign of the sine at chunk i, interleaved.
inline float4 signs(float4, long) { return float4(-1.0f, 1.0f, -1.0f, 1.0f); }
inline float signs(float, long i) { return i % 2 == 0 ? -1.0f : 1.0f; }

template <typename T, typename W, int WIDTH, bool INTERLEAVED>
kernel void rope(
    device const typename chunk<T, WIDTH>::stored* q [[buffer(0)]],
    device const typename chunk<T, WIDTH>::stored* k [[buffer(1)]],
    device const typename chunk<W, WIDTH>::stored* cos [[buffer(2)]],
    device const typename chunk<W, WIDTH>::stored* sin [[buffer(3)]],
    device const long* positions [[buffer(4)]],
    device typename chunk<T, WIDTH>::stored* q_out [[buffer(5)]],
    device typename chunk<T, WIDTH>::stored* k_out [[buffer(6)]],
    constant long& length [[buffer(7)]],
    constant long& q_heads [[buffer(8)]],
    constant long& heads [[buffer(9)]],
    constant long& heads_per_thread [[buffer(10)]],
    constant long& size [[buffer(11)]],
    constant long& half_size [[buffer(12)]],
    constant long& q_batch [[buffer(13)]],
    constant long& q_head [[buffer(14)]],
    constant long& q_position [[buffer(15)]],
    constant long& q_together [[buffer(16)]],
    constant long& k_batch [[buffer(17)]],
    constant long& k_head [[buffer(18)]],
    constant long& k_position [[buffer(19)]],
    constant long& k_together [[buffer(20)]],
    constant long& has_positions [[buffer(21)]],
    constant long& entries_batch [[buffer(22)]],
    constant long& rows [[buffer(23)]],
    constant long& row_size [[buffer(24)]],
    constant long& inverse [[buffer(25)]],
    uint3 at [[thread_position_in_grid]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  const long units = INTERLEAVED ? size : size - half_size;
  const long unit = at.x;
  const long position = at.y;
  if (unit >= units || position >= length) {
    return;
  }
  const long runs = (heads + heads_per_thread - 1) / heads_per_thread;
  const long batch = at.z / runs;
  const bool turns = unit < (INTERLEAVED ? 2 * half_size : half_size);
  const long other = unit + half_size;

  // of the unit, and (split-half) of its partners
  wide c = wide(NAN);
  wide s = wide(NAN);
  wide c_other = wide(NAN);
  wide s_other = wide(NAN);
  const long entry = batch * entries_batch + position;
  const long row = has_positions != 0 ? positions[entry] : entry;
  if (turns && row >= 0 && row < rows) {
    cos += row * row_size;
    sin += row * row_size;
    c = wide(cos[unit]);
    s = wide(sin[unit]);
    if (INTERLEAVED) {
      if (inverse != 0) {
        s = -partners(s, sin, unit);
      }
      s *= signs(s, unit);
    } else {
      const long second = row_size > half_size ? other : unit;
      c_other = second == unit ? c : wide(cos[second]);
      s_other = second == unit ? s : wide(sin[second]);
      const wide first = s;
      s = inverse != 0 ? s_other : -first;
      s_other = inverse != 0 ? -first : s_other;
    }
  }

  const long first_head = at.z % runs * heads_per_thread;
  const long last_head = min(heads, first_head + heads_per_thread);
  for (long h = first_head; h < last_head; ++h) {
    const bool is_q = h < q_heads;
    const long head = is_q ? h : h - q_heads;
    const long count = is_q ? q_heads : heads - q_heads;
    device const stored* x = is_q ? q + batch * q_batch + head * q_head + position * q_position
                                  : k + batch * k_batch + head * k_head + position * k_position;
    const bool together = (is_q ? q_together : k_together) != 0;
    const long place = together ? (batch * length + position) * count + head
                                : (batch * count + head) * length + position;
    device stored* y = (is_q ? q_out : k_out) + place * size;
    if (!turns) {
      const long i = INTERLEAVED ? unit : other;
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
  }
}

#define INSTANTIATE(T, W, WIDTH, INTERLEAVED, name)                        \
  template [[host_name("rope_" #T "_" #W "_" #WIDTH "_" name)]] [[kernel]] \
  decltype(rope<T, W, WIDTH, INTERLEAVED>) rope<T, W, WIDTH, INTERLEAVED>;

#define INSTANTIATE_LAYOUTS(T, W)           \
  INSTANTIATE(T, W, 1, false, "split")      \
  INSTANTIATE(T, W, 4, false, "split")      \
  INSTANTIATE(T, W, 1, true, "interleaved") \
  INSTANTIATE(T, W, 4, true, "interleaved")

INSTANTIATE_LAYOUTS(float, float)
INSTANTIATE_LAYOUTS(half, half)
INSTANTIATE_LAYOUTS(half, float)
INSTANTIATE_LAYOUTS(bfloat, bfloat)
INSTANTIATE_LAYOUTS(bfloat, float)
