// SPDX-License-Identifier: MIT
// One-sided Jacobi on a matrix whose columns stand in the lanes of a simdgroup: N rows in
// registers, N lanes per matrix, so that 32 / N matrices share a simdgroup.
#pragma once

#include "jacobi.h"

// Columns this short beside the largest are what rounding has left of nothing: they may lie in the
// space of the others, and would never be orthogonal to them.
constant float kNothing = 1.2e-7f;

// 2^k at or just below `largest`.
inline float power_of_two(float largest) {
  return max(as_type<float>(as_type<uint>(largest) & 0x7f800000u), 1.17549435e-38f);
}

template <int N>
inline float lanes_sum(float x) {
  for (ushort step = 1; step < N; step *= 2) {
    x += simd_shuffle_xor(x, step);
  }
  return x;
}

template <int N>
inline float lanes_max(float x) {
  for (ushort step = 1; step < N; step *= 2) {
    x = max(x, simd_shuffle_xor(x, step));
  }
  return x;
}

template <int N>
inline float squared_norm(thread const float* x) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    sum += x[i] * x[i];
  }
  return sum;
}

// The sum of y[l] over the N lanes of a matrix, for its lane l. y is used up.
template <int N>
inline float sum_for_lane(thread float* y, uint lane) {
  constexpr int HALF = N / 2;
  const bool upper = (lane & HALF) != 0;
#pragma unroll
  for (int i = 0; i < HALF; ++i) {
    const float own = upper ? y[i + HALF] : y[i];
    y[i] = own + simd_shuffle_xor(upper ? y[i] : y[i + HALF], HALF);
  }
  return sum_for_lane<HALF>(y, lane);
}

template <>
inline float sum_for_lane<1>(thread float* y, uint) {
  return y[0];
}

// The column in the lane `source` gets, where it is `missing`, a unit vector orthogonal to the
// columns that are `there`: the unit row that these leave most of, less what they hold of it,
// twice.
template <int N>
inline void complete_column(
    thread float* x, bool there, bool missing, uint lane, uint source, uint rows) {
  const uint row = lane % N;
  const uint base = lane - row;
  float held[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    held[i] = there ? x[i] * x[i] : 0.0f;
  }
  const float sum = sum_for_lane<N>(held, row);
  const float own = row < rows ? sum : INFINITY;
  const uint best = uint(-lanes_max<N>(own == -lanes_max<N>(-own) ? -float(row) : -float(N)));
  const bool mine = missing && lane == source;
#pragma unroll
  for (uint i = 0; i < N; ++i) {
    x[i] = mine ? (i == best ? 1.0f : 0.0f) : x[i];
  }
  for (int round = 0; round < 2; ++round) {
    float dot = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      dot += x[i] * simd_shuffle(x[i], source);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      held[i] = there ? dot * x[i] : 0.0f;
    }
    const float all = sum_for_lane<N>(held, row);
    float norm = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float taken = simd_shuffle(all, base + i);
      x[i] = mine ? x[i] - taken : x[i];
      norm += x[i] * x[i];
    }
    const float inverse = 1.0f / precise::sqrt(norm);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      x[i] = mine ? x[i] * inverse : x[i];
    }
  }
}

inline float turn(float own, float other, bool swap, float s, float half_tangent) {
  const float from = swap ? other : own;
  const float with = swap ? own : other;
  return from + s * (with - half_tangent * from);
}

// One sweep over all pairs of columns: lanes that differ by each mask in turn. Returns the largest
// cosine of an angle that was not right.
template <int N, bool VECTORS>
inline float sweep(thread float* x, thread float* v, uint lane, float tolerance) {
  float worst = 0.0f;
  const float largest = lanes_max<N>(squared_norm<N>(x));
  for (ushort mask = 1; mask < N; ++mask) {
    float own = 0.0f;
    float both = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      own += x[i] * x[i];
      both += x[i] * simd_shuffle_xor(x[i], mask);
    }
    const float other = simd_shuffle_xor(own, mask);
    const bool first = lane < (lane ^ mask);
    rotation r = {1.0f, 0.0f, 0.0f};
    if (min(own, other) > kNothing * kNothing * largest) {
      const float cosine = abs(both) / (precise::sqrt(own) * precise::sqrt(other));
      if (cosine > tolerance) {
        worst = max(worst, cosine);
        r = jacobi_rotation(first ? own : other, first ? other : own, both);
      }
    }
    // the longer column comes first, which converges faster: each takes the other's place for it
    const bool swap = first ? own < other : other < own;
    // c x + s y as a change of x, which is small for small angles: 1 - c = s * s / (1 + c)
    const float s = first == swap ? r.s : -r.s;
    const float half_tangent = s / (1.0f + r.c);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      x[i] = turn(x[i], simd_shuffle_xor(x[i], mask), swap, s, half_tangent);
    }
    if (VECTORS) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        v[i] = turn(v[i], simd_shuffle_xor(v[i], mask), swap, s, half_tangent);
      }
    }
  }
  return worst;
}
