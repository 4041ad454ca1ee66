// SPDX-License-Identifier: MIT
// y = gelu(gate) * up;  dgate = dy * up * gelu'(gate), dup = dy * gelu(gate)
//
// One thread per chunk of WIDTH values; n counts chunks. GELU is gelu_erf or gelu_tanh.

#include "activation.h"

template <typename T, int WIDTH, typename GELU>
[[max_total_threads_per_threadgroup(512)]] kernel void geglu(
    device const typename chunk<T, WIDTH>::stored* gate [[buffer(0)]],
    device const typename chunk<T, WIDTH>::stored* up [[buffer(1)]],
    device typename chunk<T, WIDTH>::stored* y [[buffer(2)]],
    constant uint& n [[buffer(3)]],
    uint i [[thread_position_in_grid]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  if (i < n) {
    y[i] = stored(activate<GELU>(wide(gate[i])) * wide(up[i]));
  }
}

template <typename T, int WIDTH, typename GELU>
[[max_total_threads_per_threadgroup(512)]] kernel void geglu_backward(
    device const typename chunk<T, WIDTH>::stored* dy [[buffer(0)]],
    device const typename chunk<T, WIDTH>::stored* gate [[buffer(1)]],
    device const typename chunk<T, WIDTH>::stored* up [[buffer(2)]],
    device typename chunk<T, WIDTH>::stored* dgate [[buffer(3)]],
    device typename chunk<T, WIDTH>::stored* dup [[buffer(4)]],
    constant uint& n [[buffer(5)]],
    uint i [[thread_position_in_grid]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  if (i < n) {
    const wide d = wide(dy[i]);
    wide value, slope;
    activate<GELU>(wide(gate[i]), value, slope);
    dgate[i] = stored(d * wide(up[i]) * slope);
    dup[i] = stored(d * value);
  }
}
