// SPDX-License-Identifier: MIT
// What attention and its gradient share: the scores that softmax sees, and products of tiles.
#pragma once

#include "matrix_tiles.h"

constant float kLog2e = 1.44269504f;

inline float row_max(float x) {
  x = max(x, simd_shuffle_xor(x, 1));
  return max(x, simd_shuffle_xor(x, 8));
}

inline float row_sum(float x) {
  x += simd_shuffle_xor(x, 1);
  return x + simd_shuffle_xor(x, 8);
}

// What codes stand for, and numbers as they are.
inline float decoded(float x) { return x; }
inline float decoded(half x) { return float(x); }
inline float decoded(bfloat x) { return float(x); }
inline float decoded(char x) { return float(x); }
// float8_e4m3fn: the bits of a half, whose exponent has one bit more
inline float decoded(uchar x) {
  const ushort bits = ushort(ushort(x & 0x80) << 8 | ushort(x & 0x7f) << 7);
  return (x & 0x7f) == 0x7f ? NAN : float(as_type<half>(bits)) * 256.0f;
}

// How threads share rows of WIDTH values, of which each takes four at a time.
template <int WIDTH, int THREADS>
struct staging {
  enum { LANES = WIDTH >= 128 ? 32 : WIDTH >= 64 ? 16 : WIDTH >= 32 ? 8 : 2 };
  enum { STEP = THREADS / LANES };
};

// Four values of a row, at any address. 0 times what is not finite is NaN, and so is `zero` then.
template <typename T, typename S>
inline void stage_four(threadgroup T* to, device const S* x, thread float& zero) {
  const vec<S, 4> codes = vec<S, 4>(*(device const packed_vec<S, 4>*)x);
  const float4 values =
      float4(decoded(codes.x), decoded(codes.y), decoded(codes.z), decoded(codes.w));
  zero += dot(values, float4(0.0f));
  const vec<T, 4> kept = is_same_v<T, S> ? vec<T, 4>(codes) : vec<T, 4>(values);
  *(threadgroup packed_vec<T, 4>*)to = packed_vec<T, 4>(kept);
}

// The row that starts at x[at]; where it is not whole, zeros from `width` on.
template <int WIDTH, int LANES, typename T, typename S>
inline void stage_row(
    threadgroup T* to, device const S* x, uint at, uint width, uint lane, thread float& zero) {
  if (width == WIDTH && WIDTH == 4 * LANES) {
    stage_four(to + 4 * lane, x + (at + 4 * lane), zero);
    return;
  }
#pragma unroll 1
  for (uint column = lane; column < WIDTH; column += LANES) {
    const S code = column < width ? x[at + column] : S(0);
    zero += decoded(code) * 0.0f;
    to[column] = T(decoded(code));
  }
}

// Rows `first` to `first + ROWS` of x [count, width], and zeros beyond; whether all are finite.
template <int ROWS, int WIDTH, int THREADS, typename T>
inline bool stage(
    threadgroup T* to,
    device const T* x,
    uint stride,
    int first,
    int count,
    uint width,
    uint worker) {
  constexpr uint LANES = staging<WIDTH, THREADS>::LANES, STEP = staging<WIDTH, THREADS>::STEP;
  const uint lane = worker % LANES, mine = worker / LANES;
  float zero = 0.0f;
  if (WIDTH == 4 * LANES && ROWS % STEP == 0 && width == WIDTH && first + ROWS <= count) {
    uint at = (uint(first) + mine) * stride + 4 * lane;
#pragma unroll
    for (uint r = 0; r < ROWS; r += STEP) {
      stage_four(to + (mine + r) * WIDTH + 4 * lane, x + at, zero);
      at += STEP * stride;
    }
    return zero == 0.0f;
  }
#pragma unroll 1
  for (uint r = mine; r < ROWS; r += STEP) {
    const uint row = uint(first) + r, there = int(row) < count ? width : 0;
    stage_row<WIDTH, LANES>(to + r * WIDTH, x, row * stride, there, lane, zero);
  }
  return zero == 0.0f;
}

// What a query and a key of one head give to softmax.
template <typename M, bool MASK, bool LEFT, bool RIGHT, bool CAP, bool ALIBI>
struct score_rule {
  device const M* mask;
  ulong mask_query;
  ulong mask_key;
  float scale;
  float cap;
  float alibi;
  int queries;
  int keys;
  int left;
  int right;

  // The key at which a query stands: the last query at the last key.
  int position(int query) const { return query + keys - queries; }

  // The score times log2(e), -inf where the query does not see the key; and what soft capping
  // makes of a step of the product.
  float score(float product, int query, int key, thread float& slope) const {
    float s = product * scale;
    if (CAP) {
      const float t = precise::tanh(s / cap);
      s = cap * t;
      slope = 1.0f - t * t;
    }
    const int distance = key - position(query);
    bool is_seen = query < queries && key < keys;
    if (LEFT) {
      is_seen = is_seen && distance >= -left;
    }
    if (RIGHT) {
      is_seen = is_seen && distance <= right;
    }
    if (ALIBI) {
      s -= alibi * float(abs(distance));
    }
    if (MASK && is_seen) {
      const M m = mask[ulong(query) * mask_query + ulong(key) * mask_key];
      if (is_same_v<M, bool>) {
        is_seen = bool(m);
      } else {
        is_seen = float(m) != -INFINITY;
        s += float(m);
      }
    }
    return is_seen ? s * kLog2e : -INFINITY;
  }
};

// sums [8, 8 * COLUMNS] += weights [8, 8 * ROWS] @ values, where weights of pairs that are not seen
// are 0. `seen` has bit 2 r + e for a lane's element e of weights r. Values that are not finite are
// kept from those who do not see them.
template <int ROWS, int COLUMNS, int PITCH, typename T>
inline void add_products(
    thread simdgroup_float8x8* sums,
    thread const simdgroup_float8x8* weights,
    uint seen,
    threadgroup const T* values,
    bool are_finite,
    uint2 place) {
  if (are_finite) {
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const simdgroup_float8x8 tile = tile_at(values + r * 8 * PITCH + c * 8, PITCH, place);
        simdgroup_multiply_accumulate(sums[c], weights[r], tile, sums[c]);
      }
    }
    return;
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const float2 own = float2(weights[r].thread_elements()[0], weights[r].thread_elements()[1]);
    for (uint k = 0; k < 8; ++k) {
      const ushort lane = lane_of(place.y, k);
      const float2 both = float2(simd_shuffle(own.x, lane), simd_shuffle(own.y, lane));
      const bool is_seen = (simd_shuffle(seen, lane) >> (2 * r + k % 2) & 1) != 0;
      const float weight = k % 2 == 0 ? both.x : both.y;
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        threadgroup const T* from = values + (r * 8 + k) * PITCH + c * 8 + place.x;
        sums[c].thread_elements()[0] += is_seen ? weight * float(from[0]) : 0.0f;
        sums[c].thread_elements()[1] += is_seen ? weight * float(from[1]) : 0.0f;
      }
    }
  }
}
