// SPDX-License-Identifier: MIT
// y[r, i] = x[r, 0] + ... + x[r, i], exactly, or as the sum of two floats.
//
// One threadgroup per row. Each thread has a run of `size` values: it adds them up, gets the sum of
// the runs before its own, and goes over them again.

#include "limbs.h"
#include "pair_sums.h"

template <typename T>
[[max_total_threads_per_threadgroup(128)]] kernel void cumsum_limbs(
    device const T* x [[buffer(0)]],
    device T* y [[buffer(1)]],
    constant uint& n [[buffer(2)]],
    constant uint& size [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_threadgroup]]) {
  typedef fixed_point<false> format;
  threadgroup int limbs[24 * 128];
  const limbs_of_thread own = {limbs + lane, 128};
  own.clear(format::ROWS);
  const uint first = min(lane * size, n);
  const uint count = min(size, n - first);
  x += ulong(row) * n + first;
  y += ulong(row) * n + first;
  add_share<false>(own, x, x, 0, 1, count);
  // every run has been added up
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane < uint(format::ROWS)) {
    int before = 0;
    for (uint i = 0; i < 128; ++i) {
      const int run = limbs[lane * 128 + i];
      limbs[lane * 128 + i] = before;
      before += run;
    }
  }
  // limbs of the runs before each run are there
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = 0; i < count; ++i) {
    own.add_term(bits_of(x[i]));
    own.carry(format::LIMBS);
    if (is_special(own, format::LIMBS)) {
      y[i] = special_number<T>(own, format::LIMBS);
      continue;
    }
    const magnitude found = magnitude_of(own, format::LIMBS);
    y[i] = found.is_zero() ? zero<T>(own.get(format::LIMBS + 3) == 0)
                           : found.number<T>(format::LOWEST, false, found.is_negative);
  }
}

template <typename T>
[[max_total_threads_per_threadgroup(256)]] kernel void cumsum_pairs(
    device const T* x [[buffer(0)]],
    device T* y [[buffer(1)]],
    constant uint& n [[buffer(2)]],
    constant uint& size [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  threadgroup float highs[256];
  threadgroup float lows[256];
  const uint first = min(lane * size, n);
  const uint count = min(size, n - first);
  x += ulong(row) * n + first;
  y += ulong(row) * n + first;
  two_floats sum = {0.0f, 0.0f};
  for (uint i = 0; i < count; ++i) {
    sum = with_term(sum, float(x[i]));
  }
  highs[lane] = sum.high;
  lows[lane] = sum.low;
  // every run has been added up
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 0) {
    two_floats before = {0.0f, 0.0f};
    for (uint i = 0; i < lanes; ++i) {
      const two_floats run = {highs[i], lows[i]};
      highs[i] = before.high;
      lows[i] = before.low;
      before = with_pair(before, run);
    }
  }
  // the sums of the runs before each run are there
  threadgroup_barrier(mem_flags::mem_threadgroup);
  sum = {highs[lane], lows[lane]};
  for (uint i = 0; i < count; ++i) {
    sum = with_term(sum, float(x[i]));
    y[i] = T(value_of(sum));
  }
}
