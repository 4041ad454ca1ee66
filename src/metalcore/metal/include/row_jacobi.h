// SPDX-License-Identifier: MIT
// One-sided Jacobi on the rows of a matrix that the simdgroups of a threadgroup share.
#pragma once

#include "column_jacobi.h"
#include "reduce.h"

// info of a matrix with a NaN or an inf
constant int kNotFinite = -4;

// The cosine between two columns by their Gram matrix; 0 where one of them is nothing.
inline float cosine(float pp, float qq, float pq, float level) {
  return min(pp, qq) > level * level ? abs(pq) / (precise::sqrt(pp) * precise::sqrt(qq)) : 0.0f;
}

// Rotates rows p and q of X and, in the same way, of W, 64 values each; the longer one comes first,
// which converges faster. Returns the cosine of their angle where it was not right. One simdgroup.
template <bool VECTORS>
inline float rotate_rows(
    threadgroup float* X, threadgroup float* W, uint2 at, uint lane, float level, float tolerance) {
  threadgroup float* p = X + at.x * 64 + lane;
  threadgroup float* q = X + at.y * 64 + lane;
  const float pp = simd_sum(p[0] * p[0] + p[32] * p[32]);
  const float qq = simd_sum(q[0] * q[0] + q[32] * q[32]);
  const float pq = simd_sum(p[0] * q[0] + p[32] * q[32]);
  float angle = 0.0f;
  rotation r = {1.0f, 0.0f, 0.0f, 0.0f};
  if (cosine(pp, qq, pq, level) > tolerance) {
    angle = cosine(pp, qq, pq, level);
    r = jacobi_rotation(pp, qq, pq);
  }
  const uint swap = pp < qq ? 1 : 0;
  if (r.s == 0.0f && swap == 0) {
    return angle;
  }
  for (uint side = 0; side < (VECTORS ? 2 : 1); ++side) {
    threadgroup float* rows = side == 0 ? X : W;
    for (uint i = lane; i < 64; i += 32) {
      float x = rows[at.x * 64 + i];
      float y = rows[at.y * 64 + i];
      rotate(r.s, r.h, &x, &y);
      rows[at.x * 64 + i] = swap ? y : x;
      rows[at.y * 64 + i] = swap ? x : y;
    }
  }
  return angle;
}

// Unit rows of X in place of those that are nothing: the unit vector that the others leave most of,
// less what they hold of it, twice. One simdgroup, whose lanes have the norms of two rows each.
inline void complete_rows(threadgroup float* X, float2 norms, uint n, uint lane, float level) {
  for (uint j = 0; j < n; ++j) {
    if (simd_shuffle(j < 32 ? norms.x : norms.y, j % 32) > level) {
      continue;
    }
    float2 held = float2(0.0f, lane + 32 < n ? 0.0f : INFINITY);
    for (uint k = 0; k < n; ++k) {
      held += float2(
          X[k * 64 + lane] * X[k * 64 + lane], X[k * 64 + lane + 32] * X[k * 64 + lane + 32]);
    }
    const float least = simd_min(min(held.x, held.y));
    const uint best = simd_min(held.x == least ? lane : held.y == least ? lane + 32 : 64u);
    float x = lane == best ? 1.0f : 0.0f;
    float y = lane + 32 == best ? 1.0f : 0.0f;
    for (uint round = 0; round < 2; ++round) {
      for (uint k = 0; k < n; ++k) {
        const float dot = simd_sum(x * X[k * 64 + lane] + y * X[k * 64 + lane + 32]);
        x -= dot * X[k * 64 + lane];
        y -= dot * X[k * 64 + lane + 32];
      }
      const float inverse = 1.0f / precise::sqrt(simd_sum(x * x + y * y));
      x *= inverse;
      y *= inverse;
    }
    X[j * 64 + lane] = x;
    X[j * 64 + lane + 32] = y;
  }
}
