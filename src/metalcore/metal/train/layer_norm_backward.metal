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
[[max_total_threads_per_threadgroup(384)]] kernel void layer_norm_backward(
    device const typename chunk<T, WIDTH>::stored* dy [[buffer(0)]],
    device const typename chunk<T, WIDTH>::stored* x [[buffer(1)]],
    device const typename chunk<W, WIDTH>::stored* weight [[buffer(2)]],
    device const float* mean [[buffer(3)]],
    device const float* rstd [[buffer(4)]],
    device const typename chunk<T, WIDTH>::stored* dsum [[buffer(5)]],
    device typename chunk<T, WIDTH>::stored* dx [[buffer(6)]],
    device typename chunk<T, WIDTH>::wide* weight_share [[buffer(7)]],
    device typename chunk<T, WIDTH>::wide* bias_share [[buffer(8)]],
    constant uint& rows [[buffer(9)]],
    constant uint& rows_per_block [[buffer(10)]],
    constant uint& n [[buffer(11)]],
    uint block [[threadgroup_position_in_grid]],
    uint lane [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  threadgroup float scratch[128];
  const float part = 1.0f / float(n * WIDTH);
  const uint first = block * rows_per_block;
  const uint last = min(rows, first + rows_per_block);
  weight_share += ulong(block) * n;
  bias_share += ulong(block) * n;
  dy += ulong(first) * n;
  x += ulong(first) * n;
  dsum += ulong(first) * n;
  dx += ulong(first) * n;

  wide scales[KEEP];
  wide dweight[KEEP];
  wide dbias[KEEP];
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const uint i = lane + k * lanes;
    scales[k] = i < n ? value_or<wide, WEIGHT>(1.0f, weight, i) : wide(0.0f);
    dweight[k] = wide(0.0f);
    dbias[k] = wide(0.0f);
  }
  for (uint row = first; row < last; ++row) {
    const float m = mean[row];
    const float r = rstd[row];
    stored d[KEEP];
    stored v[KEEP];
    float sum = 0.0f;
    float dot = 0.0f;
#pragma unroll
    for (int k = 0; k < KEEP; ++k) {
      const uint i = lane + k * lanes;
      if (i < n) {
        d[k] = dy[i];
        v[k] = x[i];
        const wide g = wide(d[k]) * scales[k];
        sum += total(g);
        dot += total(g * (wide(v[k]) - m));
      }
    }
    for (uint i = lane + KEEP * lanes; i < n; i += lanes) {
      const wide g = wide(dy[i]) * value_or<wide, WEIGHT>(1.0f, weight, i);
      sum += total(g);
      dot += total(g * (wide(x[i]) - m));
    }
    // two halves of scratch in turn: the barrier of one row guards the half that the next reuses
    const float2 sums =
        threadgroup_sum(float2(sum, dot * r), scratch + 64 * (row % 2), lane, lanes) * part;

#pragma unroll
    for (int k = 0; k < KEEP; ++k) {
      const uint i = lane + k * lanes;
      if (i < n) {
        const wide di = wide(d[k]);
        const wide vi = (wide(v[k]) - m) * r;
        const wide g = (di * scales[k] - sums.x - vi * sums.y) * r;
        dx[i] = stored(DSUM ? g + wide(dsum[i]) : g);
        dweight[k] += di * vi;
        dbias[k] += di;
      }
    }
    for (uint i = lane + KEEP * lanes; i < n; i += lanes) {
      const wide di = wide(dy[i]);
      const wide vi = (wide(x[i]) - m) * r;
      const wide w = value_or<wide, WEIGHT>(1.0f, weight, i);
      const wide g = (di * w - sums.x - vi * sums.y) * r;
      dx[i] = stored(DSUM ? g + wide(dsum[i]) : g);
      if (DWEIGHT) {
        weight_share[i] = (row == first ? wide(0.0f) : weight_share[i]) + di * vi;
      }
      if (DBIAS) {
        bias_share[i] = (row == first ? wide(0.0f) : bias_share[i]) + di;
      }
    }
    dy += n;
    x += n;
    dsum += n;
    dx += n;
  }

#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const uint i = lane + k * lanes;
    if (i < n && DWEIGHT) {
      weight_share[i] = dweight[k];
    }
    if (i < n && DBIAS) {
      bias_share[i] = dbias[k];
    }
  }
}
