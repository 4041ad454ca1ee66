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

// Unit vectors in place of the columns from `known` on, of `columns`, of a square matrix whose rows
// stand with N lanes, the own one in `x`: the unit row that the columns before leave most of, less
// what they hold of it, twice. Lanes without a row are not `inside`, and know all columns.
template <int N>
inline void complete_columns(
    threadgroup float* x, bool inside, uint row, uint columns, uint known) {
  for (uint j = 0; j < columns; ++j) {
    if (!simd_any(j >= known)) {
      continue;
    }
    float held = inside ? 0.0f : INFINITY;
    for (uint c = 0; inside && c < j; ++c) {
      held += x[c] * x[c];
    }
    const bool is_least = held == -lanes_max<N>(-held);
    const uint best = uint(-lanes_max<N>(is_least ? -float(row) : -float(N)));
    float unit = row == best ? 1.0f : 0.0f;
    for (uint round = 0; round < 2; ++round) {
      for (uint c = 0; c < j; ++c) {
        const float other = inside ? x[c] : 0.0f;
        unit -= lanes_sum<N>(unit * other) * other;
      }
      unit /= precise::sqrt(lanes_sum<N>(unit * unit));
    }
    if (inside && j >= known) {
      x[j] = unit;
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
    const bool first = lane < (lane ^ mask);
    const float own = squared_norm<N>(x);
    const float other = simd_shuffle_xor(own, mask);
    // one of the two lanes takes the upper rows, the other the lower ones
    float part = 0.0f;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float upper = x[i];
      const float lower = x[i + N / 2];
      part += (first ? upper : lower) * simd_shuffle_xor(first ? lower : upper, mask);
    }
    const float both = part + simd_shuffle_xor(part, mask);
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
