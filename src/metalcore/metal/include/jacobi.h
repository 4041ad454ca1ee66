// SPDX-License-Identifier: MIT
// Jacobi rotations: which pairs are rotated at the same time, and by how much.
#pragma once

#include <metal_stdlib>
using namespace metal;

// Pair `k` (of m / 2) of `round` (of m - 1): the m players of a tournament, m even, meet each other
// once in m - 1 rounds. The smaller index first; for an odd count, m - 1 is the one who pauses.
inline uint2 round_robin_pair(uint k, uint round, uint m) {
  const uint turn = m - 1;
  const uint a = k == 0 ? turn : (round + k) % turn;
  const uint b = (round + turn - k) % turn;
  return uint2(min(a, b), max(a, b));
}

// The rotation that makes [app apq; apq aqq] diagonal, by at most 45 degrees:
//   p' = c p - s q,  q' = s p + c q,  app' = app - t apq,  aqq' = aqq + t apq,  t = s / c
// or, with h = s / (1 + c), as corrections, which keep lengths better by far where angles are
// small:
//   p' = p - s (q + h p),  q' = q + s (p - h q)
struct rotation {
  float c, s, t, h;
};

// Sums of squares neither over- nor underflow; no rotation for apq = 0.
inline rotation jacobi_rotation(float app, float aqq, float apq) {
  const float d = aqq - app;
  const float b = 2.0f * apq;
  const float large = max(abs(d), abs(b));
  rotation r = {1.0f, 0.0f, 0.0f, 0.0f};
  if (b != 0.0f && large < INFINITY) {
    const float ratio = min(abs(d), abs(b)) / large;
    const float root = large * precise::sqrt(1.0f + ratio * ratio);
    r.t = (d < 0.0f ? -b : b) / (abs(d) + root);
    r.c = 1.0f / precise::sqrt(1.0f + r.t * r.t);
    r.s = r.t * r.c;
    r.h = r.s / (1.0f + r.c);
  }
  return r;
}

// Rotates p and q.
template <typename P>
inline void rotate(float s, float h, P p, P q) {
  const float x = *p;
  const float y = *q;
  *p = x - s * (y + h * x);
  *q = y + s * (x - h * y);
}
