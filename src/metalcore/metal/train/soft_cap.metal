// SPDX-License-Identifier: MIT
// y = cap * tanh(x / cap),  dx = dy / cosh(x / cap)^2
//
// One thread per chunk of WIDTH values; n counts chunks.

#include "activation.h"

template <typename T, int WIDTH>
[[max_total_threads_per_threadgroup(512)]] kernel void soft_cap(
    device const typename chunk<T, WIDTH>::stored* x [[buffer(0)]],
    device typename chunk<T, WIDTH>::stored* y [[buffer(1)]],
    constant uint& n [[buffer(2)]],
    constant float& cap [[buffer(3)]],
    uint i [[thread_position_in_grid]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  if (i < n) {
    y[i] = stored(precise::tanh(wide(x[i]) / cap) * cap);
  }
}

template <typename T, int WIDTH>
[[max_total_threads_per_threadgroup(512)]] kernel void soft_cap_backward(
    device const typename chunk<T, WIDTH>::stored* dy [[buffer(0)]],
    device const typename chunk<T, WIDTH>::stored* x [[buffer(1)]],
    device typename chunk<T, WIDTH>::stored* dx [[buffer(2)]],
    constant uint& n [[buffer(3)]],
    constant float& cap [[buffer(4)]],
    uint i [[thread_position_in_grid]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  if (i < n) {
    const wide c = precise::cosh(wide(x[i]) / cap);
    dx[i] = stored(wide(dy[i]) / c / c);
  }
}
