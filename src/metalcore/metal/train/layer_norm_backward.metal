// SPDX-License-Identifier: MIT
// v = (x - mean) * rstd,  g = dy * weight
// dx = rstd * (g - mean(g) - v * mean(g * v)) + dsum,  dweight = sum dy * v,  dbias = sum dy
//
// One threadgroup per block of rows, which also sums the block's shares of dweight and dbias. They
// are kept in registers like the row, KEEP chunks of WIDTH values per thread; the rest of a long
// row is read again, and of its shares too.

#include "layer_norm.h"

template <
    typename T,
    typename W,
    int WIDTH,
    int KEEP,
    bool WEIGHT,
    bool DSUM,
    bool DWEIGHT,
    bool DBIAS>
[[max_total_threads_per_threadgroup(1024)]] kernel void layer_norm_backward(
    device const typename chunk<T, WIDTH>::stored* dy [[buffer(0)]],
    device const typename chunk<T, WIDTH>::stored* x [[buffer(1)]],
    device const typename chunk<W, WIDTH>::stored* weight [[buffer(2)]],
    device const float* mean [[buffer(3)]],
    device const float* rstd [[buffer(4)]],
    device const typename chunk<T, WIDTH>::stored* dsum [[buffer(5)]],
    device typename chunk<T, WIDTH>::stored* dx [[buffer(6)]],
    device typename chunk<T, WIDTH>::wide* weight_share [[buffer(7)]],
    device typename chunk<T, WIDTH>::wide* bias_share [[buffer(8)]],
    constant long& rows [[buffer(9)]],
    constant long& rows_per_block [[buffer(10)]],
    constant long& n [[buffer(11)]],
    uint block [[threadgroup_position_in_grid]],
    uint lane [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  threadgroup float scratch[128];
  weight_share += block * n;
  bias_share += block * n;
  const long rest = lane + KEEP * long(lanes);

  wide scales[KEEP];
  wide dweight[KEEP];
  wide dbias[KEEP];
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const long i = lane + k * long(lanes);
    scales[k] = i < n ? value_or<wide, WEIGHT>(1.0f, weight, i) : wide(0.0f);
    dweight[k] = wide(0.0f);
    dbias[k] = wide(0.0f);
  }
  const long first = block * rows_per_block;
  const long last = min(rows, first + rows_per_block);
  for (long row = first; row < last; ++row) {
    device const stored* dy_row = dy + row * n;
    device const stored* x_row = x + row * n;
    device const stored* dsum_row = dsum + row * n;
    device stored* dx_row = dx + row * n;
    const float m = mean[row];
    const float r = rstd[row];

    wide d[KEEP];
    wide v[KEEP];
    float sum = 0.0f;
    float dot = 0.0f;
#pragma unroll
    for (int k = 0; k < KEEP; ++k) {
      const long i = lane + k * long(lanes);
      d[k] = i < n ? wide(dy_row[i]) : wide(0.0f);
      v[k] = i < n ? (wide(x_row[i]) - m) * r : wide(0.0f);
      sum += total(d[k] * scales[k]);
      dot += total(d[k] * scales[k] * v[k]);
    }
    for (long i = rest; i < n; i += lanes) {
      const wide g = wide(dy_row[i]) * value_or<wide, WEIGHT>(1.0f, weight, i);
      sum += total(g);
      dot += total(g * (wide(x_row[i]) - m) * r);
    }
    // two halves of scratch in turn: the barriers of one row guard the half that the next reuses
    threadgroup float* half_of = scratch + 64 * (row % 2);
    sum = threadgroup_sum(sum, half_of, lane, lanes) / float(n * WIDTH);
    dot = threadgroup_sum(dot, half_of + 32, lane, lanes) / float(n * WIDTH);

#pragma unroll
    for (int k = 0; k < KEEP; ++k) {
      const long i = lane + k * long(lanes);
      if (i < n) {
        const wide g = (d[k] * scales[k] - sum - v[k] * dot) * r;
        dx_row[i] = stored(DSUM ? g + wide(dsum_row[i]) : g);
        dweight[k] += d[k] * v[k];
        dbias[k] += d[k];
      }
    }
    for (long i = rest; i < n; i += lanes) {
      const wide di = wide(dy_row[i]);
      const wide vi = (wide(x_row[i]) - m) * r;
      const wide w = value_or<wide, WEIGHT>(1.0f, weight, i);
      const wide g = (di * w - sum - vi * dot) * r;
      dx_row[i] = stored(DSUM ? g + wide(dsum_row[i]) : g);
      if (DWEIGHT) {
        weight_share[i] = (row == first ? wide(0.0f) : weight_share[i]) + di * vi;
      }
      if (DBIAS) {
        bias_share[i] = (row == first ? wide(0.0f) : bias_share[i]) + di;
      }
    }
  }

#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const long i = lane + k * long(lanes);
    if (i < n && DWEIGHT) {
      weight_share[i] = dweight[k];
    }
    if (i < n && DBIAS) {
      bias_share[i] = dbias[k];
    }
  }
}
