// SPDX-License-Identifier: MIT
// y = gelu(x + bias),  dx = dy * gelu'(x + bias)
//
// One thread per chunk of WIDTH values. n and row count chunks; a row of 0 means there is no bias.
// The GELU is exact, or by tanh.

#include "activation.h"

template <typename T, int WIDTH>
kernel void gelu(
    device const typename chunk<T, WIDTH>::stored* x [[buffer(0)]],
    device const typename chunk<T, WIDTH>::stored* bias [[buffer(1)]],
    device typename chunk<T, WIDTH>::stored* y [[buffer(2)]],
    constant long& n [[buffer(3)]],
    constant long& row [[buffer(4)]],
    constant long& tanh [[buffer(5)]],
    uint i [[thread_position_in_grid]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  if (i < n) {
    const wide v = row == 0 ? wide(x[i]) : wide(x[i]) + wide(bias[i % uint(row)]);
    y[i] = stored(activate(gelu_of{tanh != 0}, v));
  }
}

template <typename T, int WIDTH>
kernel void gelu_backward(
    device const typename chunk<T, WIDTH>::stored* dy [[buffer(0)]],
    device const typename chunk<T, WIDTH>::stored* x [[buffer(1)]],
    device const typename chunk<T, WIDTH>::stored* bias [[buffer(2)]],
    device typename chunk<T, WIDTH>::stored* dx [[buffer(3)]],
    constant long& n [[buffer(4)]],
    constant long& row [[buffer(5)]],
    constant long& tanh [[buffer(6)]],
    uint i [[thread_position_in_grid]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  if (i < n) {
    const wide v = row == 0 ? wide(x[i]) : wide(x[i]) + wide(bias[i % uint(row)]);
    wide value, slope;
    activate(gelu_of{tanh != 0}, v, value, slope);
    dx[i] = stored(wide(dy[i]) * slope);
  }
}

INSTANTIATE_WIDTHS(gelu)
INSTANTIATE_WIDTHS(gelu_backward)
