// SPDX-License-Identifier: MIT
// y = gelu(x + bias),  dx = dy * gelu'(x + bias)
//
// One thread per chunk of WIDTH values. n and row count chunks.
// GELU is gelu_erf or gelu_tanh.

#include "activation.h"

template <typename T, int WIDTH, typename GELU, bool BIAS>
[[max_total_threads_per_threadgroup(512)]] kernel void gelu(
    device const typename chunk<T, WIDTH>::stored* x [[buffer(0)]],
    device const typename chunk<T, WIDTH>::stored* bias [[buffer(1)]],
    device typename chunk<T, WIDTH>::stored* y [[buffer(2)]],
    constant uint& n [[buffer(3)]],
    constant uint& row [[buffer(4)]],
    uint i [[thread_position_in_grid]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  if (i < n) {
    const wide v = BIAS ? wide(x[i]) + wide(bias[i % row]) : wide(x[i]);
    y[i] = stored(activate<GELU>(v));
  }
}

template <typename T, int WIDTH, typename GELU, bool BIAS>
[[max_total_threads_per_threadgroup(512)]] kernel void gelu_backward(
    device const typename chunk<T, WIDTH>::stored* dy [[buffer(0)]],
    device const typename chunk<T, WIDTH>::stored* x [[buffer(1)]],
    device const typename chunk<T, WIDTH>::stored* bias [[buffer(2)]],
    device typename chunk<T, WIDTH>::stored* dx [[buffer(3)]],
    constant uint& n [[buffer(4)]],
    constant uint& row [[buffer(5)]],
    uint i [[thread_position_in_grid]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  if (i < n) {
    const wide v = BIAS ? wide(x[i]) + wide(bias[i % row]) : wide(x[i]);
    wide value, slope;
    activate<GELU>(v, value, slope);
    dx[i] = stored(wide(dy[i]) * slope);
  }
}
