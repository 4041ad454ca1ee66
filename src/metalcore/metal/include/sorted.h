// SPDX-License-Identifier: MIT
// Places in sorted values.
#pragma once

#include <metal_stdlib>
using namespace metal;

// How many of the n sorted values are less than v.
inline long count_below(device const long* sorted, long n, long v) {
  long low = 0;
  long high = n;
  while (low < high) {
    const long middle = (low + high) / 2;
    if (sorted[middle] < v) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}
