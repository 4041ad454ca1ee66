// SPDX-License-Identifier: MIT
// On [outer, size, inner]:
//   gather        y[o, k, i] = x[o, index[o, k, i], i]
//   index_select  y[o, k, i] = x[o, index[k], i]
//   scatter_add   y[o, d, i] = x[o, d, i] + sum over k with index[o, k, i] = d of src[o, k, i]
//
// One thread per value of y. For scatter_add the indices come sorted along k, with the k that they
// were at, so that a thread finds its values by bisection and adds them up in order, without
// atomics. An index out of range is not read; `wrong` then holds the largest such place + 1.

#include <metal_stdlib>
using namespace metal;

// per_value: index is [outer, count, inner], else [count].
template <typename T>
kernel void gather(
    device const T* x [[buffer(0)]],
    device const long* index [[buffer(1)]],
    device T* y [[buffer(2)]],
    device atomic_int* wrong [[buffer(3)]],
    constant long& size [[buffer(4)]],
    constant long& count [[buffer(5)]],
    constant long& inner [[buffer(6)]],
    constant long& per_value [[buffer(7)]],
    uint2 at [[thread_position_in_grid]]) {
  const long i = at.x;
  const long row = at.y;
  if (i >= inner) {
    return;
  }
  const long place = per_value != 0 ? row * inner + i : row % count;
  const long d = index[place];
  if (d < 0 || d >= size) {
    atomic_fetch_max_explicit(wrong, int(place) + 1, memory_order_relaxed);
    return;
  }
  y[row * inner + i] = x[(row / count * size + d) * inner + i];
}

template <typename T>
kernel void scatter_add(
    device const T* x [[buffer(0)]],
    device const long* sorted [[buffer(1)]],
    device const long* order [[buffer(2)]],
    device const T* src [[buffer(3)]],
    device T* y [[buffer(4)]],
    constant long& size [[buffer(5)]],
    constant long& count [[buffer(6)]],
    constant long& inner [[buffer(7)]],
    uint2 at [[thread_position_in_grid]]) {
  const long i = at.x;
  const long row = at.y;
  if (i >= inner) {
    return;
  }
  const long d = row % size;
  const long plane = row / size * count * inner + i;
  long low = 0;
  long high = count;
  while (low < high) {
    const long middle = (low + high) / 2;
    if (sorted[plane + middle * inner] < d) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  float sum = float(x[row * inner + i]);
  for (long u = low; u < count && sorted[plane + u * inner] == d; ++u) {
    sum += float(src[plane + order[plane + u * inner] * inner]);
  }
  y[row * inner + i] = T(sum);
}

#define INSTANTIATE(function, T) \
  template [[host_name(#function "_" #T)]] [[kernel]] decltype(function<T>) function<T>;

INSTANTIATE(gather, float)
INSTANTIATE(gather, half)
INSTANTIATE(gather, bfloat)
INSTANTIATE(scatter_add, float)
INSTANTIATE(scatter_add, half)
INSTANTIATE(scatter_add, bfloat)
