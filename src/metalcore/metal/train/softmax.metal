// SPDX-License-Identifier: MIT
// y = exp(v - max(v)) / sum(exp(v - max(v))),  v = scale * x + mask;  dx = scale * y * (dy - sum(dy
// * y))
//
// `lanes` threads share a row: a whole threadgroup, or one simdgroup of several. They keep KEEP
// chunks of WIDTH values each in registers, and read the rest of a long row again. Lengths are in
// chunks.

#include "log_sum_exp.h"

// The mask has a row for each (a, b, c) of x's rows [.., B, C], at strides that may be 0.
struct mask_rows {
  long b;
  long c;
  long stride_a;
  long stride_b;
  long stride_c;

  long start(long row) const {
    return row / (b * c) * stride_a + row / c % b * stride_b + row % c * stride_c;
  }
};

// The values of a chunk that starts at element `first`, -inf from element `count` on.
inline float within(float v, long first, long count) { return first < count ? v : -INFINITY; }
inline float4 within(float4 v, long first, long count) {
  return float4(
      first < count ? v.x : -INFINITY, first + 1 < count ? v.y : -INFINITY,
      first + 2 < count ? v.z : -INFINITY, first + 3 < count ? v.w : -INFINITY);
}

// The values of one row before exp.
template <typename T, int WIDTH, bool MASK>
struct masked_row {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  device const stored* x;
  device const stored* mask;
  float scale;
  long count;

  wide at(long i) const thread {
    wide v = wide(x[i]) * scale;
    if (MASK) {
      v += wide(mask[i]);
    }
    return within(v, i * WIDTH, count);
  }
};

template <typename T, int WIDTH, int KEEP, bool MASK, bool CAUSAL>
[[max_total_threads_per_threadgroup(1024)]] kernel void softmax(
    device const typename chunk<T, WIDTH>::stored* x [[buffer(0)]],
    device const typename chunk<T, WIDTH>::stored* mask [[buffer(1)]],
    device typename chunk<T, WIDTH>::stored* y [[buffer(2)]],
    constant long& rows [[buffer(3)]],
    constant long& n [[buffer(4)]],
    constant long& lanes [[buffer(5)]],
    constant float& scale [[buffer(6)]],
    constant long& b [[buffer(7)]],
    constant long& c [[buffer(8)]],
    constant long& stride_a [[buffer(9)]],
    constant long& stride_b [[buffer(10)]],
    constant long& stride_c [[buffer(11)]],
    uint thread_index [[thread_position_in_grid]],
    uint in_group [[thread_position_in_threadgroup]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  threadgroup float scratch[64];
  const long row = thread_index / lanes;
  if (row >= rows) {
    return;
  }
  const uint lane = in_group % uint(lanes);
  y += row * n;
  mask += MASK ? mask_rows{b, c, stride_a, stride_b, stride_c}.start(row) : 0;
  // with causal, c is the number of rows that see one more element each
  const long count = CAUSAL ? min(n * WIDTH, row % c + 1) : n * WIDTH;
  const masked_row<T, WIDTH, MASK> v = {x + row * n, mask, scale, count};

  wide kept[KEEP];
  float most = -INFINITY;
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const long i = lane + k * lanes;
    kept[k] = i < n ? v.at(i) : wide(-INFINITY);
    most = max(most, largest(kept[k]));
  }
  running_sum rest;
  for (long i = lane + KEEP * lanes; i < n; i += lanes) {
    rest.add(v.at(i));
  }
  most = threadgroup_max(max(most, rest.most), scratch, lane, uint(lanes));

  float sum = rest.sum * precise::exp(rest.most - origin(most));
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    kept[k] = precise::exp(kept[k] - most);
    sum += total(kept[k]);
  }
  // the other half of scratch, because a thread may still read the first one
  sum = threadgroup_sum(sum, scratch + 32, lane, uint(lanes));

#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const long i = lane + k * lanes;
    if (i < n) {
      y[i] = stored(kept[k] / sum);
    }
  }
  for (long i = lane + KEEP * lanes; i < n; i += lanes) {
    y[i] = stored(precise::exp(v.at(i) - most) / sum);
  }
}

template <typename T, int WIDTH, int KEEP>
[[max_total_threads_per_threadgroup(1024)]] kernel void softmax_backward(
    device const typename chunk<T, WIDTH>::stored* dy [[buffer(0)]],
    device const typename chunk<T, WIDTH>::stored* y [[buffer(1)]],
    device typename chunk<T, WIDTH>::stored* dx [[buffer(2)]],
    constant long& rows [[buffer(3)]],
    constant long& n [[buffer(4)]],
    constant long& lanes [[buffer(5)]],
    constant float& scale [[buffer(6)]],
    uint thread_index [[thread_position_in_grid]],
    uint in_group [[thread_position_in_threadgroup]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  threadgroup float scratch[32];
  const long row = thread_index / lanes;
  if (row >= rows) {
    return;
  }
  const uint lane = in_group % uint(lanes);
  dy += row * n;
  y += row * n;
  dx += row * n;

  stored g[KEEP];
  stored p[KEEP];
  float dot = 0.0f;
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const long i = lane + k * lanes;
    g[k] = i < n ? dy[i] : stored(0.0f);
    p[k] = i < n ? y[i] : stored(0.0f);
    dot += total(wide(g[k]) * wide(p[k]));
  }
  for (long i = lane + KEEP * lanes; i < n; i += lanes) {
    dot += total(wide(dy[i]) * wide(y[i]));
  }
  dot = threadgroup_sum(dot, scratch, lane, uint(lanes));

#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const long i = lane + k * lanes;
    if (i < n) {
      dx[i] = stored(wide(p[k]) * (wide(g[k]) - dot) * scale);
    }
  }
  for (long i = lane + KEEP * lanes; i < n; i += lanes) {
    dx[i] = stored(wide(y[i]) * (wide(dy[i]) - dot) * scale);
  }
}
