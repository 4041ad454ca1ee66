// SPDX-License-Identifier: MIT
// y = exp(v - max(v)) / sum(exp(v - max(v))),  v = scale * x + mask
// dx = scale * y * (dy - sum(dy * y))
//
// The grid is lanes x rows: `lanes` threads share a row, a whole threadgroup or one simdgroup of
// several. They keep KEEP chunks of WIDTH values each in registers, and read the rest of a long
// row again. Lengths are in chunks.

#include "log_sum_exp.h"

// The values of a chunk that starts at element `first`, -inf from element `count` on.
inline float within(float v, uint first, uint count) { return first < count ? v : -INFINITY; }
inline float4 within(float4 v, uint first, uint count) {
  return float4(
      first < count ? v.x : -INFINITY, first + 1 < count ? v.y : -INFINITY,
      first + 2 < count ? v.z : -INFINITY, first + 3 < count ? v.w : -INFINITY);
}

// The values of one row before exp.
template <typename T, int WIDTH, bool MASK, bool CAUSAL>
struct masked_row {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  device const stored* x;
  device const stored* mask;
  float scale;
  uint count;

  wide at(uint i) const thread {
    wide v = wide(x[i]) * scale;
    if (MASK) {
      v += wide(mask[i]);
    }
    return CAUSAL ? within(v, i * WIDTH, count) : v;
  }
};

// The mask has a row for each (a, b, c) of x's rows [.., B, C], at strides in rows that may be 0.
// With CAUSAL, row c sees elements up to c.
template <typename T, int WIDTH, int KEEP, bool MASK, bool CAUSAL>
[[max_total_threads_per_threadgroup(512)]] kernel void softmax(
    device const typename chunk<T, WIDTH>::stored* x [[buffer(0)]],
    device const typename chunk<T, WIDTH>::stored* mask [[buffer(1)]],
    device typename chunk<T, WIDTH>::stored* y [[buffer(2)]],
    constant uint& n [[buffer(3)]],
    constant float& scale [[buffer(4)]],
    constant uint& b [[buffer(5)]],
    constant uint& c [[buffer(6)]],
    constant uint& stride_a [[buffer(7)]],
    constant uint& stride_b [[buffer(8)]],
    constant uint& stride_c [[buffer(9)]],
    uint2 at [[thread_position_in_grid]],
    uint2 size [[threads_per_threadgroup]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  threadgroup float scratch[64];
  const uint lane = at.x;
  const uint lanes = size.x;
  x += ulong(at.y) * n;
  y += ulong(at.y) * n;
  uint count = n * WIDTH;
  uint seen = n;
  if (MASK || CAUSAL) {
    const uint block = at.y / c;
    const uint in_block = at.y - block * c;
    if (MASK) {
      const uint outer = block / b;
      const uint from = outer * stride_a + (block - outer * b) * stride_b + in_block * stride_c;
      mask += ulong(from) * n;
    }
    if (CAUSAL) {
      count = min(count, in_block + 1);
      seen = (count + WIDTH - 1) / WIDTH;
    }
  }
  const masked_row<T, WIDTH, MASK, CAUSAL> v = {x, mask, scale, count};

  wide kept[KEEP];
  running_sum rest;
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const uint i = lane + k * lanes;
    kept[k] = i < seen ? v.at(i) : wide(-INFINITY);
    rest.most = max(rest.most, largest(kept[k]));
  }
  for (uint i = lane + KEEP * lanes; i < seen; i += lanes) {
    rest.add(v.at(i));
  }
  const float top = threadgroup_max(rest.most, scratch, lane, lanes);

  float sum = rest.sum * power(rest.most - top);
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    kept[k] = power(kept[k] - top);
    sum += total(kept[k]);
  }
  // the other half of scratch, because a thread may still read the first one
  const float part = 1.0f / threadgroup_sum(sum, scratch + 32, lane, lanes);

#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const uint i = lane + k * lanes;
    if (i < n) {
      y[i] = stored(kept[k] * part);
    }
  }
  for (uint i = lane + KEEP * lanes; i < n; i += lanes) {
    y[i] = stored(part * (i < seen ? power(v.at(i) - top) : wide(0.0f)));
  }
}

template <typename T, int WIDTH, int KEEP>
[[max_total_threads_per_threadgroup(512)]] kernel void softmax_backward(
    device const typename chunk<T, WIDTH>::stored* dy [[buffer(0)]],
    device const typename chunk<T, WIDTH>::stored* y [[buffer(1)]],
    device typename chunk<T, WIDTH>::stored* dx [[buffer(2)]],
    constant uint& n [[buffer(3)]],
    constant float& scale [[buffer(4)]],
    uint2 at [[thread_position_in_grid]],
    uint2 size [[threads_per_threadgroup]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  threadgroup float scratch[32];
  const uint lane = at.x;
  const uint lanes = size.x;
  dy += ulong(at.y) * n;
  y += ulong(at.y) * n;
  dx += ulong(at.y) * n;

  stored g[KEEP];
  stored p[KEEP];
  float dot = 0.0f;
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const uint i = lane + k * lanes;
    g[k] = i < n ? dy[i] : stored(0.0f);
    p[k] = i < n ? y[i] : stored(0.0f);
    dot += total(wide(g[k]) * wide(p[k]));
  }
  for (uint i = lane + KEEP * lanes; i < n; i += lanes) {
    dot += total(wide(dy[i]) * wide(y[i]));
  }
  dot = threadgroup_sum(dot, scratch, lane, lanes);

#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const uint i = lane + k * lanes;
    if (i < n) {
      dx[i] = stored(wide(p[k]) * (wide(g[k]) - dot) * scale);
    }
  }
  for (uint i = lane + KEEP * lanes; i < n; i += lanes) {
    dx[i] = stored(wide(y[i]) * (wide(dy[i]) - dot) * scale);
  }
}
