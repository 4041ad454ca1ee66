// SPDX-License-Identifier: MIT
// LayerNorm of one row, which layer_norm and add_layer_norm share.
#pragma once

#include "norm.h"

// weight[i], or `none` where there is no weight.
template <typename wide, bool WEIGHT, typename stored>
inline wide value_or(float none, device const stored* weight, uint i) {
  return WEIGHT ? wide(weight[i]) : wide(none);
}

// What the rows of a LayerNorm have in common. Lengths are in chunks of WIDTH values.
template <typename W, int WIDTH, bool WEIGHT, bool BIAS>
struct norm_of_rows {
  typedef typename chunk<W, WIDTH>::stored stored;
  device const stored* weight;
  device const stored* bias;
  uint n;
  float eps;

  // v * weight[i] + bias[i]
  template <typename wide>
  wide scaled(wide v, uint i) const thread {
    if (WEIGHT && BIAS) {
      return fma(v, wide(weight[i]), wide(bias[i]));
    }
    return WEIGHT ? v * wide(weight[i]) : v + value_or<wide, BIAS>(0.0f, bias, i);
  }
};

// x[i]; where ADD is set x[i] + residual[i], as it is stored to sum[i].
template <typename T, int WIDTH, bool ADD>
inline typename chunk<T, WIDTH>::stored row_at(
    device const typename chunk<T, WIDTH>::stored* x,
    device const typename chunk<T, WIDTH>::stored* residual,
    device typename chunk<T, WIDTH>::stored* sum,
    uint i) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  stored s = x[i];
  if (ADD) {
    s = stored(wide(s) + wide(residual[i]));
    sum[i] = s;
  }
  return s;
}

// y, mean and rstd of the row `x` by `lanes` threads. Where ADD is set, the row is x + residual,
// and written to `sum`; the norm is that of the sum as it is stored. `scratch` holds 96 floats.
template <typename T, int WIDTH, int KEEP, bool ADD, typename NORM>
inline void layer_norm_row(
    device const typename chunk<T, WIDTH>::stored* x,
    device const typename chunk<T, WIDTH>::stored* residual,
    device typename chunk<T, WIDTH>::stored* y,
    device typename chunk<T, WIDTH>::stored* sum,
    device float* mean,
    device float* rstd,
    NORM norm,
    threadgroup float* scratch,
    uint lane,
    uint lanes) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  const uint n = norm.n;
  const float part = 1.0f / float(n * WIDTH);

  stored kept[KEEP];
  float whole = 0.0f;
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const uint i = lane + k * lanes;
    kept[k] = i < n ? row_at<T, WIDTH, ADD>(x, residual, sum, i) : stored(0.0f);
    whole += total(wide(kept[k]));
  }
  for (uint i = lane + KEEP * lanes; i < n; i += lanes) {
    whole += total(wide(row_at<T, WIDTH, ADD>(x, residual, sum, i)));
  }
  const float center = threadgroup_sum(whole, scratch, lane, lanes) * part;

  // The center is rounded, so it is off the mean: by as much as all values differ, if they are
  // large and nearly the same. x - center has no such error.
  float off = 0.0f;
  float squares = 0.0f;
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const wide v = wide(kept[k]) - center;
    const bool counts = lane + k * lanes < n;
    off += counts ? total(v) : 0.0f;
    squares += counts ? squared(v) : 0.0f;
  }
  for (uint i = lane + KEEP * lanes; i < n; i += lanes) {
    const wide v = wide(ADD ? sum[i] : x[i]) - center;
    off += total(v);
    squares += squared(v);
  }
  // another part of scratch, because a thread may still read the first one
  const float2 sums = threadgroup_sum(float2(off, squares), scratch + 32, lane, lanes) * part;
  const float variance = sums.y - sums.x * sums.x;
  const float r = precise::rsqrt((variance < 0.0f ? 0.0f : variance) + norm.eps);
  const float shift = -sums.x * r;

#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const uint i = lane + k * lanes;
    if (i < n) {
      const wide v = fma(wide(kept[k]) - center, wide(r), wide(shift));
      y[i] = stored(norm.template scaled<wide>(v, i));
    }
  }
  for (uint i = lane + KEEP * lanes; i < n; i += lanes) {
    const wide v = fma(wide(ADD ? sum[i] : x[i]) - center, wide(r), wide(shift));
    y[i] = stored(norm.template scaled<wide>(v, i));
  }
  if (lane == 0) {
    *mean = center + sums.x;
    *rstd = r;
  }
}
