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

// x[i]; where ADD is set x[i] + residual[i], as it is stored.
template <bool ADD, typename wide, typename stored>
inline stored value_at(device const stored* x, device const stored* residual, uint i) {
  return ADD ? stored(wide(x[i]) + wide(residual[i])) : x[i];
}

// The same, and where ADD is set stored to sum[i].
template <bool ADD, typename wide, typename stored>
inline wide row_at(
    device const stored* x, device const stored* residual, device stored* sum, uint i) {
  const stored s = value_at<ADD, wide>(x, residual, i);
  if (ADD) {
    sum[i] = s;
  }
  return wide(s);
}

// y, mean and rstd of the row `x` by `lanes` threads. Where ADD is set, the row is x + residual,
// and written to `sum`; the norm is that of the sum as it is stored. `scratch` holds 32 floats.
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

  // Any number near the values will do, if all threads have the same: the mean of the first 32,
  // of which the last one counts again in a shorter row. Where all are equal, it is exact.
  const uint near = min(lane % 32, n * WIDTH - 1);
  const float center =
      simd_sum(float(value_at<ADD, float>((device const T*)x, (device const T*)residual, near))) *
      (1.0f / 32.0f);

  wide kept[KEEP];
  wide offs = wide(0.0f);
  wide squares = wide(0.0f);
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const uint i = lane + k * lanes;
    kept[k] = wide(0.0f);
    if (i < n) {
      kept[k] = row_at<ADD, wide>(x, residual, sum, i) - center;
    }
    offs += kept[k];
    squares = fma(kept[k], kept[k], squares);
  }
  for (uint i = lane + KEEP * lanes; i < n; i += lanes) {
    const wide v = row_at<ADD, wide>(x, residual, sum, i) - center;
    offs += v;
    squares = fma(v, v, squares);
  }
  const float part = 1.0f / float(n * WIDTH);
  const float2 sums =
      threadgroup_sum(float2(total(offs), total(squares)), scratch, lane, lanes) * part;
  const float variance = sums.y - sums.x * sums.x;
  const float r = precise::rsqrt((variance < 0.0f ? 0.0f : variance) + norm.eps);
  const float shift = -sums.x * r;

#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const uint i = lane + k * lanes;
    if (i < n) {
      y[i] = stored(norm.template scaled<wide>(fma(kept[k], wide(r), wide(shift)), i));
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
