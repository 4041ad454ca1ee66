// SPDX-License-Identifier: MIT
// Tiles of 8 x 8 values, which a simdgroup multiplies.
#pragma once

#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;

// Where a lane holds its two values of an 8 x 8 tile: the first column, and the row. Lanes of a row
// differ in bits 0 and 3.
inline uint2 place_in_tile(uint lane) {
  return uint2((lane & 8) / 2 + (lane & 1) * 2, (lane & 16) / 4 + (lane / 2 & 3));
}

// The lane that holds a value of row `row` in column `column`.
inline ushort lane_of(uint row, uint column) {
  return ushort((row & 4) * 4 + (row & 3) * 2 + (column & 4) * 2 + (column / 2 & 1));
}

// The tile that starts at `from`, in rows `pitch` apart.
template <typename T>
inline simdgroup_float8x8 tile_at(threadgroup const T* from, uint pitch, uint2 place) {
  simdgroup_float8x8 m;
  m.thread_elements() =
      float2(*(threadgroup const packed_vec<T, 2>*)(from + place.y * pitch + place.x));
  return m;
}

// Its transpose.
template <typename T>
inline simdgroup_float8x8 turned_tile_at(threadgroup const T* from, uint pitch, uint2 place) {
  simdgroup_float8x8 m;
  from += place.x * pitch + place.y;
  m.thread_elements() = float2(float(from[0]), float(from[pitch]));
  return m;
}
