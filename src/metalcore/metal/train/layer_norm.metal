// SPDX-License-Identifier: MIT
// y = (x - mean) * rstd * weight + bias,  rstd = 1 / sqrt(mean((x - mean)^2) + eps)
//
// `lanes` threads share a row: a whole threadgroup, or one simdgroup of several. They keep it in
// registers, KEEP chunks of WIDTH values each, and read the rest of a long row again. Lengths are
// in chunks.

#include "layer_norm.h"

template <typename T, typename W, int WIDTH, int KEEP, bool WEIGHT, bool BIAS>
[[max_total_threads_per_threadgroup(1024)]] kernel void layer_norm(
    device const typename chunk<T, WIDTH>::stored* x [[buffer(0)]],
    device const typename chunk<W, WIDTH>::stored* weight [[buffer(1)]],
    device const typename chunk<W, WIDTH>::stored* bias [[buffer(2)]],
    device typename chunk<T, WIDTH>::stored* y [[buffer(3)]],
    device float* mean [[buffer(4)]],
    device float* rstd [[buffer(5)]],
    constant long& rows [[buffer(6)]],
    constant long& n [[buffer(7)]],
    constant long& lanes [[buffer(8)]],
    constant float& eps [[buffer(9)]],
    uint thread_index [[thread_position_in_grid]],
    uint in_group [[thread_position_in_threadgroup]]) {
  threadgroup float scratch[64];
  const long row = thread_index / lanes;
  if (row >= rows) {
    return;
  }
  const norm_of_rows<W, WIDTH, WEIGHT, BIAS> norm = {weight, bias, n, eps};
  layer_norm_row<T, WIDTH, KEEP, false>(
      x + row * n, x, y + row * n, y, mean + row, rstd + row, norm, scratch, in_group % uint(lanes),
      uint(lanes));
}
