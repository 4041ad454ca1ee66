// SPDX-License-Identifier: MIT
// LayerNorm of one row, which layer_norm and add_layer_norm share.
#pragma once

#include "norm.h"

// Chunks of a row that a thread keeps in registers.
constant constexpr int KEEP = 4;

// weight[i], or `none` where there is no weight.
template <typename wide, typename stored>
inline wide value_or(float none, device const stored* weight, long has_weight, long i) {
  return has_weight != 0 ? wide(weight[i]) : wide(none);
}

// What the rows of a LayerNorm have in common. Lengths are in chunks of WIDTH values.
template <typename W, int WIDTH>
struct norm_of_rows {
  typedef typename chunk<W, WIDTH>::stored stored;
  device const stored* weight;
  device const stored* bias;
  long n;
  float eps;
  long has_weight;
  long has_bias;
};

// y, mean and rstd of the row `x` by `lanes` threads. Where ADD is set, the row is x + residual,
// and written to `sum`; the norm is that of the sum as it is stored. `scratch` holds 64 floats.
template <typename T, typename W, int WIDTH, bool ADD>
inline void layer_norm_row(
    device const typename chunk<T, WIDTH>::stored* x,
    device const typename chunk<T, WIDTH>::stored* residual,
    device typename chunk<T, WIDTH>::stored* y,
    device typename chunk<T, WIDTH>::stored* sum,
    device float* mean,
    device float* rstd,
    norm_of_rows<W, WIDTH> norm,
    threadgroup float* scratch,
    uint lane,
    uint lanes) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  const long n = norm.n;
  const bool keeps = n <= KEEP * long(lanes);

  wide kept[KEEP];
  float whole = 0.0f;
  for (long k = 0, i = lane; i < n; ++k, i += lanes) {
    stored s = x[i];
    if (ADD) {
      s = stored(wide(s) + wide(residual[i]));
      sum[i] = s;
    }
    if (keeps) {
      kept[k] = wide(s);
    }
    whole += total(wide(s));
  }
  const float m = threadgroup_sum(whole, scratch, lane, lanes) / float(n * WIDTH);

  float squares = 0.0f;
  for (long k = 0, i = lane; i < n; ++k, i += lanes) {
    const wide v = (keeps ? kept[k] : wide(ADD ? sum[i] : x[i])) - m;
    squares += total(v * v);
  }
  // the other half of scratch, because a thread may still read the first one
  squares = threadgroup_sum(squares, scratch + 32, lane, lanes);
  const float r = 1.0f / precise::sqrt(squares / float(n * WIDTH) + norm.eps);

  for (long k = 0, i = lane; i < n; ++k, i += lanes) {
    const wide v = (keeps ? kept[k] : wide(ADD ? sum[i] : x[i])) - m;
    const wide w = value_or<wide>(1.0f, norm.weight, norm.has_weight, i);
    y[i] = stored(v * r * w + value_or<wide>(0.0f, norm.bias, norm.has_bias, i));
  }
  if (lane == 0) {
    *mean = m;
    *rstd = r;
  }
}

#define INSTANTIATE(function, T, W, WIDTH)                              \
  template [[host_name(#function "_" #T "_" #W "_" #WIDTH)]] [[kernel]] \
  decltype(function<T, W, WIDTH>) function<T, W, WIDTH>;

#define INSTANTIATE_TYPES(function)        \
  INSTANTIATE(function, float, float, 1)   \
  INSTANTIATE(function, float, float, 4)   \
  INSTANTIATE(function, half, half, 1)     \
  INSTANTIATE(function, half, half, 4)     \
  INSTANTIATE(function, half, float, 1)    \
  INSTANTIATE(function, half, float, 4)    \
  INSTANTIATE(function, bfloat, bfloat, 1) \
  INSTANTIATE(function, bfloat, bfloat, 4) \
  INSTANTIATE(function, bfloat, float, 1)  \
  INSTANTIATE(function, bfloat, float, 4)
