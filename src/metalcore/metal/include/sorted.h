// SPDX-License-Identifier: MIT
// Places in sorted values.
#pragma once

#include <metal_stdlib>
using namespace metal;

// How many of the n sorted values are less than v.
inline uint count_below(device const long* sorted, uint n, long v) {
  uint low = 0;
  uint high = n;
  while (low < high) {
    const uint middle = low + (high - low) / 2;
    if (sorted[middle] < v) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}
