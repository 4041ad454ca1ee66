// SPDX-License-Identifier: MIT
// sum[r, i] = x[r, i] + residual[r, i],  y[r, i] = sum[r, i] * rstd[r] * (offset + weight[i])
//
// One threadgroup per row (the grid is lanes x rows), of which its threads keep KEEP chunks of
// WIDTH values each in registers; the rest of a long sum is read again. `sum` may be the memory of
// `residual`. Lengths are in chunks. The norm is that of the sum as it is stored.

#include "norm.h"

template <typename T, typename W, int WIDTH, int KEEP, bool WEIGHT>
[[max_total_threads_per_threadgroup(512)]] kernel void add_rms_norm(
    device const typename chunk<T, WIDTH>::stored* x [[buffer(0)]],
    device const typename chunk<T, WIDTH>::stored* residual [[buffer(1)]],
    device const typename chunk<W, WIDTH>::stored* weight [[buffer(2)]],
    device typename chunk<T, WIDTH>::stored* y [[buffer(3)]],
    device typename chunk<T, WIDTH>::stored* sum [[buffer(4)]],
    device float* rstd [[buffer(5)]],
    constant uint& n [[buffer(6)]],
    constant float& eps [[buffer(7)]],
    constant float& offset [[buffer(8)]],
    uint2 at [[thread_position_in_grid]],
    uint2 size [[threads_per_threadgroup]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  threadgroup float scratch[32];
  const uint lane = at.x;
  const uint lanes = size.x;
  x += ulong(at.y) * n;
  residual += ulong(at.y) * n;
  y += ulong(at.y) * n;
  sum += ulong(at.y) * n;

  stored kept[KEEP];
  float squares = 0.0f;
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const uint i = lane + k * lanes;
    kept[k] = stored(0.0f);
    if (i < n) {
      kept[k] = stored(wide(x[i]) + wide(residual[i]));
      sum[i] = kept[k];
    }
    squares += squared(wide(kept[k]));
  }
  for (uint i = lane + KEEP * lanes; i < n; i += lanes) {
    const stored s = stored(wide(x[i]) + wide(residual[i]));
    sum[i] = s;
    squares += squared(wide(s));
  }
  squares = threadgroup_sum(squares, scratch, lane, lanes);

  const float r = precise::rsqrt(squares / float(n * WIDTH) + eps);
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const uint i = lane + k * lanes;
    if (i < n) {
      y[i] = stored(wide(kept[k]) * r * scale_at<wide, WEIGHT>(weight, offset, i));
    }
  }
  for (uint i = lane + KEEP * lanes; i < n; i += lanes) {
    y[i] = stored(wide(sum[i]) * r * scale_at<wide, WEIGHT>(weight, offset, i));
  }
  if (lane == 0) {
    rstd[at.y] = r;
  }
}
