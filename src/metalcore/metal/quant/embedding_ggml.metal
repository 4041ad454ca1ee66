// SPDX-License-Identifier: MIT
// y[i, k] = value k of row indices[i] of a table in blocks of ggml.
//
// One thread per value of y. An index out of range is not read, and the largest such place + 1 is
// left in `wrong`.

#include "ggml.h"

template <typename T, int TYPE>
[[max_total_threads_per_threadgroup(256)]] kernel void embedding_ggml(
    device const long* indices [[buffer(0)]],
    device const uchar* blocks [[buffer(1)]],
    device T* y [[buffer(2)]],
    device atomic_int* wrong [[buffer(3)]],
    constant uint& rows [[buffer(4)]],
    constant uint& n [[buffer(5)]],
    uint2 at [[thread_position_in_grid]]) {
  const long row = indices[at.y];
  if (row < 0 || row >= long(rows)) {
    atomic_fetch_max_explicit(wrong, int(min(at.y, 0x7ffffffeu)) + 1, memory_order_relaxed);
    return;
  }
  const uint values = ggml<TYPE>::VALUES;
  blocks += (ulong(row) * (n / values) + at.x / values) * ggml<TYPE>::BYTES;
  y[ulong(at.y) * n + at.x] = T(ggml_value<TYPE>(blocks, at.x % values));
}
