// SPDX-License-Identifier: MIT
// y[r, i] = x[r, i] * rstd[r] * (offset + weight[i]),  rstd[r] = 1 / sqrt(mean(x[r]^2) + eps)
// dx = rstd * (dy * scale - x * rstd^2 * mean(dy * scale * x)) + dsum
// dweight[i] = sum_r dy[r, i] * x[r, i] * rstd[r]
//
// The threads of a row keep KEEP chunks of WIDTH values each in registers, and read the
// rest of a long row again. Lengths are counted in chunks. Forward: one simdgroup or one
// threadgroup per row. Backward: one threadgroup per block of rows, which also sums the block's
// share of dweight; rms_norm_dweight adds up the shares in order.

#include "norm.h"

// One simdgroup per row, so no barrier: rows of up to 32 * KEEP chunks. Each simdgroup takes a run
// of rows, for which it reads the weight once.
template <typename T, typename W, int WIDTH, int KEEP, bool WEIGHT>
[[max_total_threads_per_threadgroup(512)]] kernel void rms_norm_simdgroup(
    device const typename chunk<T, WIDTH>::stored* x [[buffer(0)]],
    device const typename chunk<W, WIDTH>::stored* weight [[buffer(1)]],
    device typename chunk<T, WIDTH>::stored* y [[buffer(2)]],
    device float* rstd [[buffer(3)]],
    constant uint& rows [[buffer(4)]],
    constant uint& rows_per_simdgroup [[buffer(5)]],
    constant uint& n [[buffer(6)]],
    constant float& eps [[buffer(7)]],
    constant float& offset [[buffer(8)]],
    uint thread_index [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  wide scales[KEEP];
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const uint i = lane + k * 32;
    scales[k] = i < n ? scale_at<wide, WEIGHT>(weight, offset, i) : wide(0.0f);
  }

  const float part = 1.0f / float(n * WIDTH);
  const uint first = thread_index / 32 * rows_per_simdgroup;
  const uint last = min(rows, first + rows_per_simdgroup);
  x += ulong(first) * n;
  y += ulong(first) * n;
  for (uint row = first; row < last; ++row, x += n, y += n) {
    wide kept[KEEP];
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < KEEP; ++k) {
      const uint i = lane + k * 32;
      kept[k] = i < n ? wide(x[i]) : wide(0.0f);
      sum += squared(kept[k]);
    }
    const float r = precise::rsqrt(simd_sum(sum) * part + eps);
#pragma unroll
    for (int k = 0; k < KEEP; ++k) {
      const uint i = lane + k * 32;
      if (i < n) {
        y[i] = stored(kept[k] * r * scales[k]);
      }
    }
    if (lane == 0) {
      rstd[row] = r;
    }
  }
}

// One threadgroup per row: the grid is lanes x rows.
template <typename T, typename W, int WIDTH, int KEEP, bool WEIGHT>
[[max_total_threads_per_threadgroup(512)]] kernel void rms_norm(
    device const typename chunk<T, WIDTH>::stored* x [[buffer(0)]],
    device const typename chunk<W, WIDTH>::stored* weight [[buffer(1)]],
    device typename chunk<T, WIDTH>::stored* y [[buffer(2)]],
    device float* rstd [[buffer(3)]],
    constant uint& n [[buffer(4)]],
    constant float& eps [[buffer(5)]],
    constant float& offset [[buffer(6)]],
    uint2 at [[thread_position_in_grid]],
    uint2 size [[threads_per_threadgroup]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  threadgroup float scratch[32];
  const uint lane = at.x;
  const uint lanes = size.x;
  x += ulong(at.y) * n;
  y += ulong(at.y) * n;

  stored kept[KEEP];
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const uint i = lane + k * lanes;
    kept[k] = i < n ? x[i] : stored(0.0f);
    sum += squared(wide(kept[k]));
  }
  for (uint i = lane + KEEP * lanes; i < n; i += lanes) {
    sum += squared(wide(x[i]));
  }
  sum = threadgroup_sum(sum, scratch, lane, lanes);

  const float r = precise::rsqrt(sum / float(n * WIDTH) + eps);
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const uint i = lane + k * lanes;
    if (i < n) {
      y[i] = stored(wide(kept[k]) * r * scale_at<wide, WEIGHT>(weight, offset, i));
    }
  }
  for (uint i = lane + KEEP * lanes; i < n; i += lanes) {
    y[i] = stored(wide(x[i]) * r * scale_at<wide, WEIGHT>(weight, offset, i));
  }
  if (lane == 0) {
    rstd[at.y] = r;
  }
}

// One threadgroup per block of rows. share[block, i] is the block's part of dweight[i].
template <typename T, typename W, int WIDTH, int KEEP, bool WEIGHT, bool DSUM, bool SHARE>
[[max_total_threads_per_threadgroup(384)]] kernel void rms_norm_backward(
    device const typename chunk<T, WIDTH>::stored* dy [[buffer(0)]],
    device const typename chunk<T, WIDTH>::stored* x [[buffer(1)]],
    device const typename chunk<W, WIDTH>::stored* weight [[buffer(2)]],
    device const float* rstd [[buffer(3)]],
    device const typename chunk<T, WIDTH>::stored* dsum [[buffer(4)]],
    device typename chunk<T, WIDTH>::stored* dx [[buffer(5)]],
    device typename chunk<T, WIDTH>::wide* share [[buffer(6)]],
    constant uint& rows [[buffer(7)]],
    constant uint& rows_per_block [[buffer(8)]],
    constant uint& n [[buffer(9)]],
    constant float& offset [[buffer(10)]],
    uint block [[threadgroup_position_in_grid]],
    uint lane [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  threadgroup float scratch[64];
  const float part = 1.0f / float(n * WIDTH);
  const uint first = block * rows_per_block;
  const uint last = min(rows, first + rows_per_block);
  share += ulong(block) * n;
  dy += ulong(first) * n;
  x += ulong(first) * n;
  dsum += ulong(first) * n;
  dx += ulong(first) * n;

  wide scales[KEEP];
  wide sums[KEEP];
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const uint i = lane + k * lanes;
    scales[k] = i < n ? scale_at<wide, WEIGHT>(weight, offset, i) : wide(0.0f);
    sums[k] = wide(0.0f);
  }
  for (uint row = first; row < last; ++row) {
    const float r = rstd[row];
    stored g[KEEP];
    stored v[KEEP];
    float dot = 0.0f;
#pragma unroll
    for (int k = 0; k < KEEP; ++k) {
      const uint i = lane + k * lanes;
      if (i < n) {
        g[k] = dy[i];
        v[k] = x[i];
        dot += total(wide(g[k]) * scales[k] * wide(v[k]));
      }
    }
    for (uint i = lane + KEEP * lanes; i < n; i += lanes) {
      dot += total(wide(dy[i]) * scale_at<wide, WEIGHT>(weight, offset, i) * wide(x[i]));
    }
    // two halves of scratch in turn: the barrier of one row guards the half that the next reuses
    dot = threadgroup_sum(dot, scratch + 32 * (row % 2), lane, lanes);
    const float pull = dot * r * r * part;

#pragma unroll
    for (int k = 0; k < KEEP; ++k) {
      const uint i = lane + k * lanes;
      if (i < n) {
        const wide gi = wide(g[k]);
        const wide vi = wide(v[k]);
        const wide d = (gi * scales[k] - vi * pull) * r;
        dx[i] = stored(DSUM ? d + wide(dsum[i]) : d);
        sums[k] += gi * (vi * r);
      }
    }
    for (uint i = lane + KEEP * lanes; i < n; i += lanes) {
      const wide gi = wide(dy[i]);
      const wide vi = wide(x[i]);
      const wide d = (gi * scale_at<wide, WEIGHT>(weight, offset, i) - vi * pull) * r;
      dx[i] = stored(DSUM ? d + wide(dsum[i]) : d);
      if (SHARE) {
        share[i] = (row == first ? wide(0.0f) : share[i]) + gi * (vi * r);
      }
    }
    dy += n;
    x += n;
    dsum += n;
    dx += n;
  }

  if (SHARE) {
#pragma unroll
    for (int k = 0; k < KEEP; ++k) {
      const uint i = lane + k * lanes;
      if (i < n) {
        share[i] = sums[k];
      }
    }
  }
}

// One thread per column.
template <typename W>
[[max_total_threads_per_threadgroup(512)]] kernel void rms_norm_dweight(
    device const float* share [[buffer(0)]],
    device W* dweight [[buffer(1)]],
    constant uint& blocks [[buffer(2)]],
    constant uint& n [[buffer(3)]],
    uint i [[thread_position_in_grid]]) {
  if (i >= n) {
    return;
  }
  share += i;
  float sum = 0.0f;
  for (uint block = 0; block < blocks; ++block, share += n) {
    sum += *share;
  }
  dweight[i] = W(sum);
}
