// SPDX-License-Identifier: MIT
// y = (x - mean) * rstd * weight + bias,  rstd = 1 / sqrt(mean((x - mean)^2) + eps)
//
// The grid is lanes x rows: `lanes` threads share a row, a whole threadgroup or one simdgroup of
// several. They keep it in registers, KEEP chunks of WIDTH values each, and read the rest of a long
// row again. Lengths are in chunks.

#include "layer_norm.h"

template <typename T, typename W, int WIDTH, int KEEP, bool WEIGHT, bool BIAS>
[[max_total_threads_per_threadgroup(512)]] kernel void layer_norm(
    device const typename chunk<T, WIDTH>::stored* x [[buffer(0)]],
    device const typename chunk<W, WIDTH>::stored* weight [[buffer(1)]],
    device const typename chunk<W, WIDTH>::stored* bias [[buffer(2)]],
    device typename chunk<T, WIDTH>::stored* y [[buffer(3)]],
    device float* mean [[buffer(4)]],
    device float* rstd [[buffer(5)]],
    constant uint& n [[buffer(6)]],
    constant float& eps [[buffer(7)]],
    uint2 at [[thread_position_in_grid]],
    uint2 size [[threads_per_threadgroup]]) {
  threadgroup float scratch[96];
  const ulong row = at.y;
  const norm_of_rows<W, WIDTH, WEIGHT, BIAS> norm = {weight, bias, n, eps};
  layer_norm_row<T, WIDTH, KEEP, false>(
      x + row * n, x, y + row * n, y, mean + row, rstd + row, norm, scratch, at.x, size.x);
}
