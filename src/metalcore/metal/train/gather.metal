// SPDX-License-Identifier: MIT
// On [outer, size, inner]:
//   gather        y[o, k, i] = x[o, index[o, k, i], i]
//   index_select  y[o, k, i] = x[o, index[k], i]
//   scatter_add   y[o, d, i] = x[o, d, i] + sum over k with index[o, k, i] = d of src[o, k, i]
//
// One thread per value of y. For scatter_add the indices come as [outer, inner, count], sorted,
// with the k that they were at, so that a thread finds its values by bisection and adds them up in
// order, without atomics. An index out of range is not read, and `wrong` is more than 0: for
// gather, the largest such place + 1.

#include "sorted.h"

// PER_VALUE: index is [outer, count, inner], else [count].
template <typename T, bool PER_VALUE>
[[max_total_threads_per_threadgroup(1024)]] kernel void gather(
    device const T* x [[buffer(0)]],
    device const long* index [[buffer(1)]],
    device T* y [[buffer(2)]],
    device atomic_int* wrong [[buffer(3)]],
    constant long& size [[buffer(4)]],
    constant long& count [[buffer(5)]],
    constant long& inner [[buffer(6)]],
    uint2 at [[thread_position_in_grid]]) {
  const long i = at.x;
  const long row = at.y;
  if (i >= inner) {
    return;
  }
  const long place = PER_VALUE ? row * inner + i : row % count;
  const long d = index[place];
  if (d < 0 || d >= size) {
    atomic_fetch_max_explicit(wrong, int(place) + 1, memory_order_relaxed);
    return;
  }
  y[row * inner + i] = x[(row / count * size + d) * inner + i];
}

template <typename T>
[[max_total_threads_per_threadgroup(1024)]] kernel void scatter_add(
    device const T* x [[buffer(0)]],
    device const long* sorted [[buffer(1)]],
    device const long* order [[buffer(2)]],
    device const T* src [[buffer(3)]],
    device T* y [[buffer(4)]],
    device atomic_int* wrong [[buffer(5)]],
    constant long& size [[buffer(6)]],
    constant long& count [[buffer(7)]],
    constant long& inner [[buffer(8)]],
    uint2 at [[thread_position_in_grid]]) {
  const long i = at.x;
  const long row = at.y;
  if (i >= inner) {
    return;
  }
  const long d = row % size;
  const long outer = row / size;
  sorted += (outer * inner + i) * count;
  order += (outer * inner + i) * count;
  src += outer * count * inner + i;
  if (d == 0 && (sorted[0] < 0 || sorted[count - 1] >= size)) {
    atomic_fetch_max_explicit(wrong, 1, memory_order_relaxed);
  }
  float sum = float(x[row * inner + i]);
  for (long u = count_below(sorted, count, d); u < count && sorted[u] == d; ++u) {
    sum += float(src[order[u] * inner]);
  }
  y[row * inner + i] = T(sum);
}
