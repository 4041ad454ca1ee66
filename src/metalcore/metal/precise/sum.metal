// SPDX-License-Identifier: MIT
// y[r] = sum or mean of x[r, :], exactly, or as the sum of two floats.
//
// Rows are cut into slices, one per threadgroup, whose parts a second kernel puts together, one
// threadgroup per row. A row has at most 2^32 - 1 values.

#include "slice_sums.h"

// The grid is slices x rows, `size` values each.
template <typename T>
[[max_total_threads_per_threadgroup(128)]] kernel void sum_limbs(
    device const T* x [[buffer(0)]],
    device int* parts [[buffer(1)]],
    constant uint& n [[buffer(2)]],
    constant uint& size [[buffer(3)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint2 groups [[threadgroups_per_grid]],
    uint lane [[thread_index_in_threadgroup]]) {
  typedef fixed_point<false> format;
  threadgroup int limbs[24 * 128];
  const limbs_of_thread own = {limbs + lane, 128};
  own.clear(format::ROWS);
  const uint first = group.x * size;
  x += ulong(group.y) * n + first;
  add_share<false>(own, x, x, lane, 128, min(size, n - first));
  const ulong slice = ulong(group.y) * groups.x + group.x;
  write_limbs<false>(limbs, parts + slice * format::ROWS, lane, 128);
}

template <typename T, bool MEAN>
[[max_total_threads_per_threadgroup(32)]] kernel void sum_rounded(
    device const int* parts [[buffer(0)]],
    device T* y [[buffer(1)]],
    constant uint& n [[buffer(2)]],
    constant uint& slices [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_threadgroup]]) {
  typedef fixed_point<false> format;
  threadgroup long totals[24];
  threadgroup int limbs[28];
  parts += ulong(row) * slices * format::ROWS;
  const limbs_of_thread sum = merged<false>(parts, slices, totals, limbs, lane);
  if (lane != 0) {
    return;
  }
  const magnitude found = magnitude_of(sum, format::LIMBS);
  if (is_special(sum, format::LIMBS)) {
    y[row] = special_number<T>(sum, format::LIMBS);
  } else if (found.is_zero()) {
    // of no other terms than -0
    y[row] = zero<T>(sum.get(format::LIMBS + 3) == 0);
  } else if (MEAN) {
    y[row] = quotient<T>(found, limbs, format::LOWEST, n);
  } else {
    y[row] = found.number<T>(format::LOWEST, false, found.is_negative);
  }
}

template <typename T>
[[max_total_threads_per_threadgroup(256)]] kernel void sum_pairs(
    device const T* x [[buffer(0)]],
    device float* parts [[buffer(1)]],
    constant uint& n [[buffer(2)]],
    constant uint& size [[buffer(3)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint2 groups [[threadgroups_per_grid]],
    uint2 threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_threadgroup]]) {
  threadgroup float scratch[64];
  const uint first = group.x * size;
  const uint count = min(size, n - first);
  x += ulong(group.y) * n + first;
  two_floats sum = {0.0f, 0.0f};
  for (uint i = lane; i < count; i += threads.x) {
    sum = with_term(sum, float(x[i]));
  }
  sum = threadgroup_pair_sum(sum, scratch, lane, threads.x);
  const ulong slice = ulong(group.y) * groups.x + group.x;
  if (lane == 0) {
    parts[2 * slice] = sum.high;
    parts[2 * slice + 1] = sum.low;
  }
}

// One thread per row.
template <typename T, bool MEAN>
[[max_total_threads_per_threadgroup(64)]] kernel void sum_of_pairs(
    device const float* parts [[buffer(0)]],
    device T* y [[buffer(1)]],
    constant uint& n [[buffer(2)]],
    constant uint& slices [[buffer(3)]],
    uint row [[thread_position_in_grid]]) {
  parts += 2 * ulong(row) * slices;
  two_floats sum = {0.0f, 0.0f};
  for (uint s = 0; s < slices; ++s) {
    sum = with_pair(sum, {parts[2 * s], parts[2 * s + 1]});
  }
  y[row] = T(MEAN ? quotient_of(sum, n) : value_of(sum));
}
