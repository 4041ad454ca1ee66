// SPDX-License-Identifier: MIT
// LayerNorm of one row, which layer_norm and add_layer_norm share.
#pragma once

#include "norm.h"

// weight[i], or `none` where there is no weight.
template <typename wide, bool WEIGHT, typename stored>
inline wide value_or(float none, device const stored* weight, long i) {
  return WEIGHT ? wide(weight[i]) : wide(none);
}

// What the rows of a LayerNorm have in common. Lengths are in chunks of WIDTH values.
template <typename W, int WIDTH, bool WEIGHT, bool BIAS>
struct norm_of_rows {
  typedef typename chunk<W, WIDTH>::stored stored;
  device const stored* weight;
  device const stored* bias;
  long n;
  float eps;

  // v * weight[i] + bias[i]
  template <typename wide>
  wide scaled(wide v, long i) const thread {
    return v * value_or<wide, WEIGHT>(1.0f, weight, i) + value_or<wide, BIAS>(0.0f, bias, i);
  }
};

// x[i]; where ADD is set x[i] + residual[i], as it is stored to sum[i].
template <typename T, int WIDTH, bool ADD>
inline typename chunk<T, WIDTH>::stored row_at(
    device const typename chunk<T, WIDTH>::stored* x,
    device const typename chunk<T, WIDTH>::stored* residual,
    device typename chunk<T, WIDTH>::stored* sum,
    long i) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  stored s = x[i];
  if (ADD) {
    s = stored(wide(s) + wide(residual[i]));
    sum[i] = s;
  }
  return s;
}

// The mean of values that come one by one, and the sum of squares of their distances from it.
struct running_moments {
  float seen = 0.0f;
  float mean = 0.0f;
  float squares = 0.0f;

  template <typename wide>
  void add(wide v, int width) thread {
    seen += float(width);
    const wide off = v - mean;
    mean += total(off) / seen;
    squares += total(off * (v - mean));
  }
  // their squares from another center
  float around(float center) const thread {
    return squares + seen * (mean - center) * (mean - center);
  }
};

// y, mean and rstd of the row `x` by `lanes` threads. Where ADD is set, the row is x + residual,
// and written to `sum`; the norm is that of the sum as it is stored. `scratch` holds 64 floats.
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
  const long n = norm.n;

  stored kept[KEEP];
  float whole = 0.0f;
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const long i = lane + k * long(lanes);
    kept[k] = i < n ? row_at<T, WIDTH, ADD>(x, residual, sum, i) : stored(0.0f);
    whole += total(wide(kept[k]));
  }
  running_moments rest;
  for (long i = lane + KEEP * long(lanes); i < n; i += lanes) {
    rest.add(wide(row_at<T, WIDTH, ADD>(x, residual, sum, i)), WIDTH);
  }
  whole += rest.seen * rest.mean;
  const float m = threadgroup_sum(whole, scratch, lane, lanes) / float(n * WIDTH);

  float squares = rest.around(m);
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const wide v = wide(kept[k]) - m;
    squares += lane + k * long(lanes) < n ? total(v * v) : 0.0f;
  }
  // the other half of scratch, because a thread may still read the first one
  squares = threadgroup_sum(squares, scratch + 32, lane, lanes);
  const float r = 1.0f / precise::sqrt(squares / float(n * WIDTH) + norm.eps);

#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const long i = lane + k * long(lanes);
    if (i < n) {
      y[i] = stored(norm.template scaled<wide>((wide(kept[k]) - m) * r, i));
    }
  }
  for (long i = lane + KEEP * long(lanes); i < n; i += lanes) {
    y[i] = stored(norm.template scaled<wide>((wide(ADD ? sum[i] : x[i]) - m) * r, i));
  }
  if (lane == 0) {
    *mean = m;
    *rstd = r;
  }
}
