// SPDX-License-Identifier: MIT
// Two-sided Jacobi on a symmetric matrix in threadgroup memory: load, diagonalise, store in order.
//
// Matrices are scaled by a power of two to a largest element of 1/2 to 1.
#pragma once

#include "jacobi.h"

// stands in for the exponent of a matrix with a NaN or an inf
constant constexpr int kPoisoned = 1 << 20;

// A symmetric problem of `m` rows, m even, that `lanes` threads work on.
struct problem {
  threadgroup float* a;  // lower triangle by rows
  threadgroup float* v;  // columns of Q, `ld` apart
  threadgroup float* s;  // the rotations of a round
  threadgroup float* h;
  threadgroup uint* pairs;  // p + 2^16 q
  uint m;
  uint ld;
  uint lane;
  uint lanes;
};

inline uint lower(uint i, uint j) { return i > j ? i * (i + 1) / 2 + j : j * (j + 1) / 2 + i; }

// |x|, and infinity for a NaN.
inline float magnitude(float x) { return abs(x) < INFINITY ? abs(x) : INFINITY; }

// The power of two that brings `largest` to 1/2 to 1.
inline int exponent_of(float largest) {
  int exponent = 0;
  frexp(largest < INFINITY ? largest : 0.0f, exponent);
  return largest < INFINITY ? exponent : kPoisoned;
}

inline float scaled(float x, int exponent) {
  return exponent == kPoisoned ? 0.0f : ldexp(x, -exponent);
}

// Finds the rotation of pair k, and turns the block on the diagonal. Whether there is one.
inline bool find_rotation(thread const problem& at, uint round, float threshold) {
  const uint k = at.lane;
  const uint2 pair = round_robin_pair(k, round, at.m);
  const uint pp = lower(pair.x, pair.x);
  const uint qq = lower(pair.y, pair.y);
  const uint pq = lower(pair.x, pair.y);
  const float apq = at.a[pq];
  const bool rotates = abs(apq) > threshold;
  const rotation turn = jacobi_rotation(at.a[pp], at.a[qq], rotates ? apq : 0.0f);
  at.s[k] = turn.s;
  at.h[k] = turn.h;
  at.pairs[k] = pair.x + (pair.y << 16);
  if (rotates) {
    at.a[pp] -= turn.t * apq;
    at.a[qq] += turn.t * apq;
    at.a[pq] = 0.0f;
  }
  return rotates;
}

// Rotates the 2 x 2 blocks off the diagonal from both sides: every two pairs of the round meet.
inline void rotate_blocks(thread const problem& at) {
  const uint h = at.m / 2;
  for (uint i = at.lane; i < h * (h - 1) / 2; i += at.lanes) {
    const uint k = i % h;
    const uint l = (k + i / h + 1) % h;
    const float s = at.s[k];
    const float t = at.s[l];
    if (s == 0.0f && t == 0.0f) {
      continue;
    }
    const uint p = at.pairs[k] & 0xffff;
    const uint q = at.pairs[k] >> 16;
    const uint u = at.pairs[l] & 0xffff;
    const uint w = at.pairs[l] >> 16;
    float pu = at.a[lower(p, u)];
    float pw = at.a[lower(p, w)];
    float qu = at.a[lower(q, u)];
    float qw = at.a[lower(q, w)];
    rotate(s, at.h[k], &pu, &qu);
    rotate(s, at.h[k], &pw, &qw);
    rotate(t, at.h[l], &pu, &pw);
    rotate(t, at.h[l], &qu, &qw);
    at.a[lower(p, u)] = pu;
    at.a[lower(p, w)] = pw;
    at.a[lower(q, u)] = qu;
    at.a[lower(q, w)] = qw;
  }
}

// N, a power of two, is at least m: lanes take neighbouring rows of Q.
template <uint N>
inline void rotate_vectors(thread const problem& at) {
  for (uint i = at.lane; i < at.m / 2 * N; i += at.lanes) {
    const uint k = i / N;
    const uint row = i % N;
    const float s = at.s[k];
    if (row < at.m && s != 0.0f) {
      rotate(
          s, at.h[k], at.v + (at.pairs[k] & 0xffff) * at.ld + row,
          at.v + (at.pairs[k] >> 16) * at.ld + row);
    }
  }
}

// The largest value among the lanes of a team, or of its simdgroup where it has several.
template <typename T>
inline T simdgroup_max(T x, uint lanes) {
  for (ushort step = min(lanes, 32u) / 2; step > 0; step /= 2) {
    x = max(x, simd_shuffle_xor(x, step));
  }
  return x;
}

// The largest value among the threads of a team. `scratch` holds a value per simdgroup of it.
inline float team_max(float x, threadgroup float* scratch, uint lane, uint lanes) {
  x = simdgroup_max(x, lanes);
  if (lanes > 32) {
    if (lane % 32 == 0) {
      scratch[lane / 32] = x;
    }
    // every simdgroup's largest is in scratch
    threadgroup_barrier(mem_flags::mem_threadgroup);
    x = simdgroup_max(lane % 32 < lanes / 32 ? scratch[lane % 32] : 0.0f, 32);
  }
  return x;
}

// Sweeps over all pairs until one finds nothing to rotate, or `sweeps` times: whether the own team
// found nothing in the last one. All threads of the threadgroup call it together; `active` has two
// turns of a flag per team.
template <uint N, uint TEAMS, bool VECTORS>
inline bool diagonalise(
    thread const problem& at, threadgroup uint* active, uint team, float threshold, int sweeps) {
  bool goes_on = true;
  bool converged = false;
  // the matrices are loaded
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int sweep = 0; sweep < sweeps && goes_on; ++sweep) {
    uint rotated = 0;
    threadgroup uint* flags = active + sweep % 2 * TEAMS;
    for (uint round = 0; round + 1 < at.m; ++round) {
      // at most 32 pairs: all in the first simdgroup
      if (at.lane < at.m / 2 && find_rotation(at, round, threshold)) {
        rotated = 1;
      }
      if (round + 2 == at.m) {
        rotated = simdgroup_max(rotated, at.lanes);
        if (at.lane == 0) {
          flags[team] = rotated;
        }
      }
      // the rotations of the round are known
      threadgroup_barrier(mem_flags::mem_threadgroup);
      rotate_blocks(at);
      if (VECTORS) {
        rotate_vectors<N>(at);
      }
      // the matrix is complete for the next round
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    goes_on = false;
    for (uint i = 0; i < TEAMS; ++i) {
      goes_on = goes_on || flags[i] != 0;
    }
    converged = flags[team] == 0;
  }
  return converged;
}

inline void set_identity(thread const problem& at) {
  for (uint i = at.lane; i < at.m * at.m; i += at.lanes) {
    at.v[i / at.m * at.ld + i % at.m] = i / at.m == i % at.m ? 1.0f : 0.0f;
  }
}

// `count` matrices [n, n], one after another, to rows of v that are `ld` apart and matrices that
// are N rows apart, by all threads of the threadgroup together; places without one get zeros.
inline void load(
    threadgroup float* v,
    uint ld,
    uint N,
    uint places,
    device const float* from,
    uint count,
    uint n,
    uint index,
    uint threads) {
  for (uint i = index; i < places * n * n; i += threads) {
    const uint place = i / (n * n);
    v[(place * N + i / n % n) * ld + i % n] = place < count ? from[i] : 0.0f;
  }
  // the matrices are there
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Takes the lower triangle of the n rows in v, brings it to a largest element of 1/2 to 1, and sets
// Q to the identity; `scratch` is for team_max. Returns the exponent.
template <bool VECTORS>
inline int prepare(thread const problem& at, uint n, threadgroup float* scratch) {
  float largest = 0.0f;
  for (uint i = at.lane; i < n * n; i += at.lanes) {
    if (i % n <= i / n) {
      const float x = at.v[i / n * at.ld + i % n];
      at.a[lower(i / n, i % n)] = x;
      largest = max(largest, magnitude(x));
    }
  }
  const int exponent = exponent_of(team_max(largest, scratch, at.lane, at.lanes));
  // each thread scales what it took
  for (uint i = at.lane; i < n * n; i += at.lanes) {
    if (i % n <= i / n) {
      at.a[lower(i / n, i % n)] = scaled(at.a[lower(i / n, i % n)], exponent);
    }
  }
  // a last row of zeros makes an odd number of rows even
  for (uint i = at.lane; i < (at.m - n) * at.m; i += at.lanes) {
    at.a[lower(n, i)] = 0.0f;
  }
  if (VECTORS) {
    // v is read, and free for Q
    threadgroup_barrier(mem_flags::mem_threadgroup);
    set_identity(at);
  }
  return exponent;
}

// Eigenvalues in ascending order, unless the team has no `own` matrix, and in `order` the column of
// each, or kNone for all of a poisoned matrix.
constant constexpr uint kNone = 0xffff;

inline void store_values(
    thread const problem& at,
    bool own,
    uint n,
    int exponent,
    threadgroup uint* order,
    device float* values) {
  const bool poisoned = exponent == kPoisoned;
  for (uint i = at.lane; i < n; i += at.lanes) {
    const float value = at.a[lower(i, i)];
    uint rank = 0;
    for (uint j = 0; j < n; ++j) {
      const float other = at.a[lower(j, j)];
      rank += other < value || (other == value && j < i) ? 1 : 0;
    }
    order[rank] = poisoned ? kNone : i;
    if (own) {
      values[rank] = poisoned ? NAN : ldexp(value, exponent);
    }
  }
}

// Eigenvectors of `count` matrices, whose columns are `ld` and which are themselves N columns
// apart, by all threads of the threadgroup together.
inline void store_vectors(
    threadgroup const float* v,
    uint ld,
    uint N,
    threadgroup const uint* order,
    uint count,
    uint n,
    device float* to,
    uint index,
    uint threads) {
  // the order of all columns is known
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = index; i < count * n * n; i += threads) {
    const uint place = i / (n * n);
    const uint column = order[place * N + i % n];
    to[i] = column == kNone ? NAN : v[(place * N + column) * ld + i / n % n];
  }
}
