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
[[max_total_threads_per_threadgroup(1024)]] kernel void rms_norm_simdgroup(
    device const typename chunk<T, WIDTH>::stored* x [[buffer(0)]],
    device const typename chunk<W, WIDTH>::stored* weight [[buffer(1)]],
    device typename chunk<T, WIDTH>::stored* y [[buffer(2)]],
    device float* rstd [[buffer(3)]],
    constant long& rows [[buffer(4)]],
    constant long& rows_per_simdgroup [[buffer(5)]],
    constant long& n [[buffer(6)]],
    constant float& eps [[buffer(7)]],
    constant float& offset [[buffer(8)]],
    uint thread_index [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  wide scales[KEEP];
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const long i = lane + k * 32;
    scales[k] = i < n ? scale_at<wide, WEIGHT>(weight, offset, i) : wide(0.0f);
  }

  const long first = thread_index / 32 * rows_per_simdgroup;
  const long last = min(rows, first + rows_per_simdgroup);
  for (long row = first; row < last; ++row) {
    wide kept[KEEP];
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < KEEP; ++k) {
      const long i = lane + k * 32;
      kept[k] = i < n ? wide(x[row * n + i]) : wide(0.0f);
      sum += total(kept[k] * kept[k]);
    }
    const float r = 1.0f / precise::sqrt(simd_sum(sum) / float(n * WIDTH) + eps);
#pragma unroll
    for (int k = 0; k < KEEP; ++k) {
      const long i = lane + k * 32;
      if (i < n) {
        y[row * n + i] = stored(kept[k] * r * scales[k]);
      }
    }
    if (lane == 0) {
      rstd[row] = r;
    }
  }
}

// One threadgroup per row.
template <typename T, typename W, int WIDTH, int KEEP, bool WEIGHT>
[[max_total_threads_per_threadgroup(1024)]] kernel void rms_norm(
    device const typename chunk<T, WIDTH>::stored* x [[buffer(0)]],
    device const typename chunk<W, WIDTH>::stored* weight [[buffer(1)]],
    device typename chunk<T, WIDTH>::stored* y [[buffer(2)]],
    device float* rstd [[buffer(3)]],
    constant long& n [[buffer(4)]],
    constant float& eps [[buffer(5)]],
    constant float& offset [[buffer(6)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  threadgroup float scratch[32];
  x += row * n;
  y += row * n;

  stored kept[KEEP];
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const long i = lane + k * lanes;
    kept[k] = i < n ? x[i] : stored(0.0f);
    sum += total(wide(kept[k]) * wide(kept[k]));
  }
  for (long i = lane + KEEP * lanes; i < n; i += lanes) {
    const wide v = wide(x[i]);
    sum += total(v * v);
  }
  sum = threadgroup_sum(sum, scratch, lane, lanes);

  const float r = 1.0f / precise::sqrt(sum / float(n * WIDTH) + eps);
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const long i = lane + k * lanes;
    if (i < n) {
      y[i] = stored(wide(kept[k]) * r * scale_at<wide, WEIGHT>(weight, offset, i));
    }
  }
  for (long i = lane + KEEP * lanes; i < n; i += lanes) {
    y[i] = stored(wide(x[i]) * r * scale_at<wide, WEIGHT>(weight, offset, i));
  }
  if (lane == 0) {
    rstd[row] = r;
  }
}

// One threadgroup per block of rows. share[block, i] is the block's part of dweight[i].
template <typename T, typename W, int WIDTH, int KEEP, bool WEIGHT, bool DSUM, bool SHARE>
[[max_total_threads_per_threadgroup(1024)]] kernel void rms_norm_backward(
    device const typename chunk<T, WIDTH>::stored* dy [[buffer(0)]],
    device const typename chunk<T, WIDTH>::stored* x [[buffer(1)]],
    device const typename chunk<W, WIDTH>::stored* weight [[buffer(2)]],
    device const float* rstd [[buffer(3)]],
    device const typename chunk<T, WIDTH>::stored* dsum [[buffer(4)]],
    device typename chunk<T, WIDTH>::stored* dx [[buffer(5)]],
    device typename chunk<T, WIDTH>::wide* share [[buffer(6)]],
    constant long& rows [[buffer(7)]],
    constant long& rows_per_block [[buffer(8)]],
    constant long& n [[buffer(9)]],
    constant float& offset [[buffer(10)]],
    uint block [[threadgroup_position_in_grid]],
    uint lane [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  threadgroup float scratch[64];
  share += block * n;

  wide scales[KEEP];
  wide sums[KEEP];
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const long i = lane + k * lanes;
    scales[k] = i < n ? scale_at<wide, WEIGHT>(weight, offset, i) : wide(0.0f);
    sums[k] = wide(0.0f);
  }

  const long first = block * rows_per_block;
  const long last = min(rows, first + rows_per_block);
  for (long row = first; row < last; ++row) {
    device const stored* dy_row = dy + row * n;
    device const stored* x_row = x + row * n;
    device const stored* dsum_row = dsum + row * n;
    device stored* dx_row = dx + row * n;
    const float r = rstd[row];

    wide g[KEEP];
    wide v[KEEP];
    float dot = 0.0f;
#pragma unroll
    for (int k = 0; k < KEEP; ++k) {
      const long i = lane + k * lanes;
      g[k] = i < n ? wide(dy_row[i]) : wide(0.0f);
      v[k] = i < n ? wide(x_row[i]) : wide(0.0f);
      dot += total(g[k] * scales[k] * v[k]);
    }
    for (long i = lane + KEEP * lanes; i < n; i += lanes) {
      dot += total(wide(dy_row[i]) * scale_at<wide, WEIGHT>(weight, offset, i) * wide(x_row[i]));
    }
    // two halves of scratch in turn: the barrier of one row guards the half that the next reuses
    dot = threadgroup_sum(dot, scratch + 32 * (row % 2), lane, lanes);
    const float pull = dot * r * r / float(n * WIDTH);

#pragma unroll
    for (int k = 0; k < KEEP; ++k) {
      const long i = lane + k * lanes;
      if (i < n) {
        wide d = (g[k] * scales[k] - v[k] * pull) * r;
        if (DSUM) {
          d += wide(dsum_row[i]);
        }
        dx_row[i] = stored(d);
        sums[k] += g[k] * (v[k] * r);
      }
    }
    for (long i = lane + KEEP * lanes; i < n; i += lanes) {
      const wide gi = wide(dy_row[i]);
      const wide vi = wide(x_row[i]);
      wide d = (gi * scale_at<wide, WEIGHT>(weight, offset, i) - vi * pull) * r;
      if (DSUM) {
        d += wide(dsum_row[i]);
      }
      dx_row[i] = stored(d);
      if (SHARE) {
        share[i] = (row == first ? wide(0.0f) : share[i]) + gi * (vi * r);
      }
    }
  }

  if (SHARE) {
#pragma unroll
    for (int k = 0; k < KEEP; ++k) {
      const long i = lane + k * lanes;
      if (i < n) {
        share[i] = sums[k];
      }
    }
  }
}

// One thread per column.
template <typename W>
[[max_total_threads_per_threadgroup(1024)]] kernel void rms_norm_dweight(
    device const float* share [[buffer(0)]],
    device W* dweight [[buffer(1)]],
    constant long& blocks [[buffer(2)]],
    constant long& n [[buffer(3)]],
    uint i [[thread_position_in_grid]]) {
  if (i >= n) {
    return;
  }
  float sum = 0.0f;
  for (long block = 0; block < blocks; ++block) {
    sum += share[block * n + i];
  }
  dweight[i] = W(sum);
}
