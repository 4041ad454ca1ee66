// SPDX-License-Identifier: MIT
// On [outer, size, inner]:
//   gather        y[o, k, i] = x[o, index[o, k, i], i]
//   index_select  y[o, k, i] = x[o, index[k], i]
//   scatter_add   y[o, d, i] = x[o, d, i] + sum over k with index[o, k, i] = d of src[o, k, i]
//
// One thread per value of y: the grid is that of y, inner first. PLACE counts the values of a
// tensor: uint, or ulong for large ones. For scatter_add the indices come as [outer, inner, count],
// sorted, with the k that they were at, so that a thread finds its values by bisection and adds
// them up in order, without atomics. An index out of range is not read, and `wrong` is more than 0:
// for gather, the largest such place + 1.

#include "sorted.h"

// PER_VALUE: index is [outer, count, inner], else [count].
template <typename T, typename PLACE, bool PER_VALUE>
[[max_total_threads_per_threadgroup(512)]] kernel void gather(
    device const T* x [[buffer(0)]],
    device const long* index [[buffer(1)]],
    device T* y [[buffer(2)]],
    device atomic_int* wrong [[buffer(3)]],
    constant uint& size [[buffer(4)]],
    constant uint& count [[buffer(5)]],
    constant uint& inner [[buffer(6)]],
    uint3 at [[thread_position_in_grid]]) {
  const PLACE to = (PLACE(at.z) * count + at.y) * inner + at.x;
  const PLACE place = PER_VALUE ? to : at.y;
  const long d = index[place];
  if (d < 0 || d >= long(size)) {
    const int seen = int(min(place, PLACE(0x7ffffffe)));
    atomic_fetch_max_explicit(wrong, seen + 1, memory_order_relaxed);
    return;
  }
  y[to] = x[(PLACE(at.z) * size + PLACE(d)) * inner + at.x];
}

template <typename T, typename PLACE>
[[max_total_threads_per_threadgroup(512)]] kernel void scatter_add(
    device const T* x [[buffer(0)]],
    device const long* sorted [[buffer(1)]],
    device const long* order [[buffer(2)]],
    device const T* src [[buffer(3)]],
    device T* y [[buffer(4)]],
    device atomic_int* wrong [[buffer(5)]],
    constant uint& size [[buffer(6)]],
    constant uint& count [[buffer(7)]],
    constant uint& inner [[buffer(8)]],
    uint3 at [[thread_position_in_grid]]) {
  const PLACE first = (PLACE(at.z) * inner + at.x) * count;
  const PLACE to = (PLACE(at.z) * size + at.y) * inner + at.x;
  const long d = at.y;
  sorted += first;
  order += first;
  src += PLACE(at.z) * count * inner + at.x;
  if (d == 0 && (sorted[0] < 0 || sorted[count - 1] >= long(size))) {
    atomic_fetch_max_explicit(wrong, 1, memory_order_relaxed);
  }
  float sum = float(x[to]);
  for (uint u = count_below(sorted, count, d); u < count && sorted[u] == d; ++u) {
    sum += float(src[PLACE(order[u]) * inner]);
  }
  y[to] = T(sum);
}
