// SPDX-License-Identifier: MIT
// A X = B with triangular A, where each number is a sum of two floats.
//
// A thread solves for one column of X, row by row; neighbours have neighbouring columns.

#include "double_float.h"

template <bool LOWER>
[[max_total_threads_per_threadgroup(64)]] kernel void double_float_trsm(
    device const float* A [[buffer(0)]],
    device const float* A_low [[buffer(1)]],
    device const float* B [[buffer(2)]],
    device const float* B_low [[buffer(3)]],
    device float* X [[buffer(4)]],
    device float* X_low [[buffer(5)]],
    constant uint& N [[buffer(6)]],
    constant uint& K [[buffer(7)]],
    uint2 at [[thread_position_in_grid]]) {
  if (at.x >= K) {
    return;
  }
  const ulong matrix = ulong(at.y) * N * N;
  const ulong column = ulong(at.y) * N * K + at.x;
  for (uint step = 0; step < N; ++step) {
    const uint i = LOWER ? step : N - 1 - step;
    const ulong row = matrix + ulong(i) * N;
    const ulong here = column + ulong(i) * K;
    three_floats rest = {B[here], B_low[here], 0.0f};
    for (uint known = 0; known < step; ++known) {
      const uint j = LOWER ? known : N - 1 - known;
      const ulong there = column + ulong(j) * K;
      rest = with_products(rest, {-A[row + j], -A_low[row + j]}, {X[there], X_low[there]});
    }
    const two_floats right = rounded(rest);
    const float plain = right.high / A[row + i];
    const two_floats found = is_plain(plain) ? pair_quotient(right, {A[row + i], A_low[row + i]})
                                             : two_floats{plain, 0.0f};
    X[here] = found.high;
    X_low[here] = found.low;
  }
}
