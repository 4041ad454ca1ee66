// SPDX-License-Identifier: MIT
// Instructions of Apple GPUs without a name in Metal, which some kernels declare by their names in
// the compiler's own language: copies that go on beside the kernel, and products of matrices whose
// elements are in vectors.
#pragma once

namespace metal {
// A lane holds two elements of a matrix; kernels look at them in other types too.
template <typename T>
struct vec<T, 64> {
  alignas(8) T e[4];
  vec() = default;
};

// Whatever pointer a kernel keeps of a copy.
struct msl_event {
  template <typename T>
  operator T*() const {
    return nullptr;
  }
};
inline void msl_copy_element(char* to, const char* from, ulong bytes) {
  switch (bytes) {
    case 1:
      *(uchar*)to = from ? *(const uchar*)from : uchar(0);
      break;
    case 2:
      *(ushort*)to = from ? *(const ushort*)from : ushort(0);
      break;
    case 4:
      *(uint*)to = from ? *(const uint*)from : 0u;
      break;
    case 8:
      *(ulong*)to = from ? *(const ulong*)from : 0ul;
      break;
    default:
      for (ulong i = 0; i < bytes; ++i) to[i] = from ? from[i] : char(0);
  }
}

// The lanes of a simdgroup copy together. Nobody waits here: a copy is done when it is asked for.
struct msl_air_simdgroup_async_copy_1d {
  msl_event operator()(ulong bytes, ulong, void* to, const void* from, ulong n) const {
    for (ulong i = msl_lane(); i < n; i += 32)
      msl_copy_element((char*)to + i * bytes, (const char*)from + i * bytes, bytes);
    msl_collective(nullptr, 0, msl_serve_nothing, msl::kCooperative, 0);
    return {};
  }
};
// A tile of columns and rows; what lies beyond the source's is 0, or the nearest within it.
struct msl_air_simdgroup_async_copy_2d {
  msl_event operator()(ulong bytes, ulong, void* to, ulong to_row, ulong, ulong2 to_tile,
                       const void* from, ulong from_row, ulong, ulong2 from_tile, long2 offset,
                       int clamps) const {
    const ulong width = to_tile.get(0), height = to_tile.get(1);
    const long columns = long(from_tile.get(0)), rows = long(from_tile.get(1));
    for (ulong i = msl_lane(); i < width * height; i += 32) {
      long x = long(i % width) + offset.get(0), y = long(i / width) + offset.get(1);
      const bool is_inside = x >= 0 && y >= 0 && x < columns && y < rows;
      x = clamp(x, 0l, columns - 1), y = clamp(y, 0l, rows - 1);
      const char* source = (const char*)from + (ulong(y) * from_row + ulong(x)) * bytes;
      msl_copy_element((char*)to + (i / width * to_row + i % width) * bytes,
                       is_inside || clamps ? source : nullptr, bytes);
    }
    msl_collective(nullptr, 0, msl_serve_nothing, msl::kCooperative, 0);
    return {};
  }
};
struct msl_air_wait_simdgroup_events {
  template <typename T>
  void operator()(int, T) const {
    simdgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
  }
};
}  // namespace metal

template <typename A, typename B, typename C>
inline metal::vec<C, 64> __metal_simdgroup_matrix_8x8_multiply_accumulate(
    const metal::vec<A, 64>& a, const metal::vec<B, 64>& b, const metal::vec<C, 64>& c,
    const metal::vec<C, 64>&) {
  metal::simdgroup_matrix<A, 8, 8> left;
  metal::simdgroup_matrix<B, 8, 8> right;
  metal::simdgroup_matrix<C, 8, 8> sum;
  left.elements = metal::vec<A, 2>(a.e[0], a.e[1]);
  right.elements = metal::vec<B, 2>(b.e[0], b.e[1]);
  sum.elements = metal::vec<C, 2>(c.e[0], c.e[1]);
  metal::simdgroup_multiply_accumulate(sum, left, right, sum);
  metal::vec<C, 64> r = c;
  r.e[0] = sum.elements.get(0);
  r.e[1] = sum.elements.get(1);
  return r;
}
