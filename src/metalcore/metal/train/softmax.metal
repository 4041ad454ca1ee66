// SPDX-License-Identifier: MIT
// y = exp(v - max(v)) / sum(exp(v - max(v))),  v = scale * x + mask;  dx = scale * y * (dy - sum(dy
// * y))
//
// `lanes` threads share a row: a whole threadgroup, or one simdgroup of several. They keep it in
// registers, KEEP chunks of WIDTH values each; longer rows are read again. Lengths are in chunks.

#include "rows.h"

constant constexpr int KEEP = 4;

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

template <typename T, int WIDTH>
kernel void softmax(
    device const typename chunk<T, WIDTH>::stored* x [[buffer(0)]],
    device const typename chunk<T, WIDTH>::stored* mask [[buffer(1)]],
    device typename chunk<T, WIDTH>::stored* y [[buffer(2)]],
    constant long& rows [[buffer(3)]],
    constant long& n [[buffer(4)]],
    constant long& lanes [[buffer(5)]],
    constant float& scale [[buffer(6)]],
    constant long& causal [[buffer(7)]],
    constant long& has_mask [[buffer(8)]],
    constant long& b [[buffer(9)]],
    constant long& c [[buffer(10)]],
    constant long& stride_a [[buffer(11)]],
    constant long& stride_b [[buffer(12)]],
    constant long& stride_c [[buffer(13)]],
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
  x += row * n;
  y += row * n;
  mask += has_mask != 0 ? mask_rows{b, c, stride_a, stride_b, stride_c}.start(row) : 0;
  // with causal, c is the number of rows that see one more element each
  const long count = causal != 0 ? min(n * WIDTH, row % c + 1) : n * WIDTH;
  const bool keeps = n <= KEEP * lanes;

  wide kept[KEEP];
  float most = -INFINITY;
  for (long k = 0, i = lane; i < n; ++k, i += lanes) {
    wide v = wide(x[i]) * scale;
    if (has_mask != 0) {
      v += wide(mask[i]);
    }
    v = within(v, i * WIDTH, count);
    if (keeps) {
      kept[k] = v;
    }
    most = max(most, largest(v));
  }
  most = row_max(most, scratch, lane, uint(lanes));

  float sum = 0.0f;
  for (long k = 0, i = lane; i < n; ++k, i += lanes) {
    wide v;
    if (keeps) {
      v = kept[k];
    } else {
      v = wide(x[i]) * scale;
      if (has_mask != 0) {
        v += wide(mask[i]);
      }
      v = within(v, i * WIDTH, count);
    }
    v = precise::exp(v - most);
    if (keeps) {
      kept[k] = v;
    }
    sum += total(v);
  }
  // the other half of scratch, because a thread may still read the first one
  sum = threadgroup_sum(sum, scratch + 32, lane, uint(lanes));

  for (long k = 0, i = lane; i < n; ++k, i += lanes) {
    wide v;
    if (keeps) {
      v = kept[k];
    } else {
      v = wide(x[i]) * scale;
      if (has_mask != 0) {
        v += wide(mask[i]);
      }
      v = precise::exp(within(v, i * WIDTH, count) - most);
    }
    y[i] = stored(v / sum);
  }
}

template <typename T, int WIDTH>
kernel void softmax_backward(
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
  const bool keeps = n <= KEEP * lanes;

  wide g[KEEP];
  wide p[KEEP];
  float dot = 0.0f;
  for (long k = 0, i = lane; i < n; ++k, i += lanes) {
    const wide gi = wide(dy[i]);
    const wide pi = wide(y[i]);
    if (keeps) {
      g[k] = gi;
      p[k] = pi;
    }
    dot += total(gi * pi);
  }
  dot = threadgroup_sum(dot, scratch, lane, uint(lanes));

  for (long k = 0, i = lane; i < n; ++k, i += lanes) {
    const wide gi = keeps ? g[k] : wide(dy[i]);
    const wide pi = keeps ? p[k] : wide(y[i]);
    dx[i] = stored(pi * (gi - dot) * scale);
  }
}

INSTANTIATE_WIDTHS(softmax)
INSTANTIATE_WIDTHS(softmax_backward)
