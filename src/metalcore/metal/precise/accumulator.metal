// SPDX-License-Identifier: MIT
// limbs[r] = the exact sum of x[r, :] in limbs of 32 bits, of which limb 0 counts 2^-2176, and
// after them whether there was a NaN, an infinity, its negative, or a term other than -0, and n.
//
// From the limbs of 16 bits of all slices of a row: one thread per row and column.

#include "limbs.h"

[[max_total_threads_per_threadgroup(256)]] kernel void limbs_merged(
    device const int* parts [[buffer(0)]],
    device long* limbs [[buffer(1)]],
    constant uint& n [[buffer(2)]],
    constant uint& slices [[buffer(3)]],
    uint2 at [[thread_position_in_grid]]) {
  typedef fixed_point<false> format;
  constexpr int FIRST = (format::LOWEST + 2176) / 32;
  constexpr int ALL = 134;
  const int column = int(at.x);
  parts += ulong(at.y) * slices * format::ROWS;
  long total = 0;
  if (column >= FIRST && column < FIRST + format::LIMBS / 2) {
    parts += 2 * (column - FIRST);
    for (uint s = 0; s < slices; ++s) {
      total += parts[s * format::ROWS] + long(parts[s * format::ROWS + 1]) * 65536;
    }
  } else if (column >= ALL && column < ALL + COUNTS) {
    parts += format::LIMBS + column - ALL;
    for (uint s = 0; s < slices; ++s) {
      total |= parts[s * format::ROWS] != 0 ? 1 : 0;
    }
  } else if (column == ALL + COUNTS) {
    total = n;
  }
  limbs[ulong(at.y) * (ALL + COUNTS + 1) + column] = total;
}
