// SPDX-License-Identifier: MIT
// A = P L U with partial pivoting: row i of L U is row rows[i] of A.
//
// lu_simdgroup: m, n <= WIDTH, one matrix per WIDTH lanes, a row in each lane's registers.
// lu_threadgroup: m, n <= 64, one matrix per threadgroup of 64 threads, in threadgroup memory.
// Larger ones in panels of up to 32 columns: lu_panel factors a panel, lu_columns swaps the rows of
// all other columns and solves with the panel's L; a matrix product does the rest.

#include "lu.h"

// L, U and rows of `count` matrices, whose values stand in `a`, rows LD apart and SPAN rows for
// each, at order[position].
template <int LD, int SPAN>
inline void write_factors(
    threadgroup const float* a,
    threadgroup const int* order,
    int m,
    int n,
    int count,
    int thread_index,
    int threads,
    device long* rows,
    device float* L,
    device float* U) {
  const int k = min(m, n);
  for (int e = thread_index; e < count * m; e += threads) {
    rows[e] = order[e / m * SPAN + e % m] % SPAN;
  }
  for (int e = thread_index; e < count * m * k; e += threads) {
    const int r = e / k;
    const int i = r % m;
    const int j = e % k;
    const float value = a[order[r / m * SPAN + i] * LD + j];
    L[e] = j < i ? value : j == i ? 1.0f : 0.0f;
  }
  for (int e = thread_index; e < count * k * n; e += threads) {
    const int r = e / n;
    const int i = r % k;
    const int j = e % n;
    const float value = a[order[r / k * SPAN + i] * LD + j];
    U[e] = j < i ? 0.0f : value;
  }
}

template <int WIDTH>
kernel void lu_simdgroup(
    device const float* A [[buffer(0)]],
    device long* rows [[buffer(1)]],
    device float* L [[buffer(2)]],
    device float* U [[buffer(3)]],
    device int* info [[buffer(4)]],
    constant long& batch [[buffer(5)]],
    constant long& m [[buffer(6)]],
    constant long& n [[buffer(7)]],
    uint thread_index [[thread_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float tiles[4224];
  threadgroup int orders[128];
  threadgroup float* tile = tiles + simdgroup * 1056;
  threadgroup int* order = orders + simdgroup * 32;
  const long first = long(thread_index / 32) * (32 / WIDTH);
  if (first >= batch) {
    return;
  }
  const int count = int(min(batch - first, long(32 / WIDTH)));
  const int row = int(lane % WIDTH);
  const int height = int(m);
  const int width = int(n);

  load_rows<WIDTH>(A + first * m * n, height, width, n, count, lane, tile);
  // the rows are in the tile
  simdgroup_barrier(mem_flags::mem_threadgroup);
  float a[WIDTH];
  const bool mine = int(lane / WIDTH) < count && row < height;
#pragma unroll
  for (int j = 0; j < WIDTH; ++j) {
    a[j] = mine && j < width ? tile[lane * 33 + j] : 0.0f;
  }
  int position;
  int failed;
  factor_in_lanes<WIDTH>(a, height, width, row, ushort(lane - row), position, failed);
#pragma unroll
  for (int j = 0; j < WIDTH; ++j) {
    if (j < width) {
      tile[lane * 33 + j] = a[j];
    }
  }
  order[lane - row + position] = lane;
  // the factors are in the tile
  simdgroup_barrier(mem_flags::mem_threadgroup);
  const int k = min(height, width);
  write_factors<33, WIDTH>(
      tile, order, height, width, count, lane, 32, rows + first * m, L + first * m * k,
      U + first * k * n);
  if (row == 0 && mine) {
    info[first + lane / WIDTH] = failed;
  }
}

template <typename T>
kernel void lu_threadgroup(
    device const T* A [[buffer(0)]],
    device long* rows [[buffer(1)]],
    device T* L [[buffer(2)]],
    device T* U [[buffer(3)]],
    device int* info [[buffer(4)]],
    constant long& m [[buffer(5)]],
    constant long& n [[buffer(6)]],
    uint matrix [[threadgroup_position_in_grid]],
    uint row [[thread_position_in_threadgroup]]) {
  threadgroup float a[4160];
  threadgroup float found[4];
  threadgroup int place[4];
  threadgroup int order[64];
  const int height = int(m);
  const int width = int(n);
  for (int e = row; e < height * width; e += 64) {
    a[e / width * 65 + e % width] = A[matrix * m * n + e];
  }
  // the matrix is in threadgroup memory
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int position;
  int failed;
  factor_in_threadgroup(a, found, place, height, width, row, position, failed);
  order[position] = row;
  // the factors and their order are there
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int k = min(height, width);
  write_factors<65, 64>(
      a, order, height, width, 1, row, 64, rows + matrix * m, L + matrix * m * k,
      U + matrix * k * n);
  if (row == 0) {
    info[matrix] = failed;
  }
}

// Factors the columns panel[j] [height] of one matrix per threadgroup; they are columns first.. of
// A, from row `first` on. Each thread has the rows of its own that are a threadgroup's size apart.
template <typename T>
kernel void lu_panel(
    device T* panel [[buffer(0)]],
    device int* pivots [[buffer(1)]],
    device long* rows [[buffer(2)]],
    device int* info [[buffer(3)]],
    constant long& height [[buffer(4)]],
    constant long& width [[buffer(5)]],
    constant long& first [[buffer(6)]],
    uint matrix [[threadgroup_position_in_grid]],
    uint thread_index [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup float found[64];
  threadgroup int place[64];
  const int h = int(height);
  const int w = int(width);
  const uint lane = thread_index % 32;
  panel += matrix * height * width;
  rows += matrix * (first + height) + first;
  for (int p = 0; p < min(h, w); ++p) {
    device float* column = panel + p * height;
    float largest = -1.0f;
    int at = h;
    for (int i = thread_index; i < h; i += threads) {
      const float size = pivot_size(column[i], i >= p);
      at = size > largest ? i : at;
      largest = max(size, largest);
    }
    float most = simd_max(largest);
    int q = simd_min(largest == most ? at : h);
    // two halves in turn: the barriers of one step guard the half that the next uses
    threadgroup float* sizes = found + p % 2 * 32;
    threadgroup int* places = place + p % 2 * 32;
    if (lane == 0) {
      sizes[thread_index / 32] = most;
      places[thread_index / 32] = q;
    }
    // candidates of all simdgroups are there, and rows as the step before left them
    threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
    largest = lane < threads / 32 ? sizes[lane] : -1.0f;
    most = simd_max(largest);
    q = simd_min(lane < threads / 32 && largest == most ? places[lane] : h);
    if (int(thread_index) < w && q != p) {
      device float* values = panel + thread_index * height;
      const float value = values[p];
      values[p] = values[q];
      values[q] = value;
    }
    // the pivot row is in its place
    threadgroup_barrier(mem_flags::mem_device);
    const float pivot = column[p];
    for (int i = thread_index; i < h; i += threads) {
      if (i > p) {
        const float l = multiplier(column[i], pivot);
        column[i] = l;
        for (int j = p + 1; j < w; ++j) {
          panel[j * height + i] -= l * panel[j * height + p];
        }
      }
    }
    if (thread_index == 0) {
      pivots[matrix * 32 + p] = q;
      const long row = rows[p];
      rows[p] = rows[q];
      rows[q] = row;
      if (pivot == 0.0f && info[matrix] == 0) {
        info[matrix] = int(first) + p + 1;
      }
    }
  }
}

// Swaps rows of the columns of A [m, n] beside the panel of columns first..last, and turns those
// after it into U = L^-1 A. One thread per column.
template <typename T>
kernel void lu_columns(
    device const int* pivots [[buffer(0)]],
    device T* A [[buffer(1)]],
    constant long& m [[buffer(2)]],
    constant long& n [[buffer(3)]],
    constant long& first [[buffer(4)]],
    constant long& last [[buffer(5)]],
    uint2 position [[thread_position_in_grid]],
    uint2 in_group [[thread_position_in_threadgroup]],
    uint2 group [[threads_per_threadgroup]]) {
  threadgroup float L[1024];
  device float* top = A + position.y * m * n + first * n;
  const int w = int(last - first);
  const int steps = int(min(last, m) - first);
  for (int e = in_group.x; e < steps * steps; e += group.x) {
    L[e] = top[e / steps * n + first + e % steps];
  }
  // the panel's L is there
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const long column = position.x;
  if (column >= n || (column >= first && column < first + w)) {
    return;
  }
  for (int p = 0; p < steps; ++p) {
    const int q = pivots[position.y * 32 + p];
    const float value = top[p * n + column];
    top[p * n + column] = top[q * n + column];
    top[q * n + column] = value;
  }
  if (column >= last) {
    float x[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (i < steps) {
        float sum = top[i * n + column];
#pragma unroll
        for (int j = 0; j < i; ++j) {
          sum -= L[i * steps + j] * x[j];
        }
        x[i] = sum;
        top[i * n + column] = sum;
      }
    }
  }
}

#define INSTANTIATE(function, variant)              \
  template [[host_name(#function "_" #variant)]] [[ \
      kernel]] decltype(function<variant>) function<variant>;

INSTANTIATE(lu_simdgroup, 8)
INSTANTIATE(lu_simdgroup, 16)
INSTANTIATE(lu_simdgroup, 32)
INSTANTIATE(lu_threadgroup, float)
INSTANTIATE(lu_panel, float)
INSTANTIATE(lu_columns, float)
