// SPDX-License-Identifier: MIT
// A = P L U with partial pivoting: row i of L U is row rows[i] of A.
//
// lu_simdgroup: m, n <= WIDTH, one matrix per WIDTH lanes, a row in each lane's registers.
// lu_threadgroup: m, n <= 64, one matrix per threadgroup of 64 threads, in threadgroup memory.
// Larger ones in panels of up to PANEL columns: lu_panel factors a panel, lu_columns orders the
// rows of all other columns and solves with the panel's L; a matrix product does the rest, and
// lu_finish takes L and U apart. lu_permutation: P.

#include "lu.h"
#include "triangular.h"

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

template <int WIDTH, int SIMDGROUPS>
[[max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] kernel void lu_simdgroup(
    device const float* A [[buffer(0)]],
    device long* rows [[buffer(1)]],
    device float* L [[buffer(2)]],
    device float* U [[buffer(3)]],
    device int* info [[buffer(4)]],
    constant uint& batch [[buffer(5)]],
    constant uint& m [[buffer(6)]],
    constant uint& n [[buffer(7)]],
    uint thread_index [[thread_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int LD = WIDTH + 1;
  threadgroup float tiles[SIMDGROUPS * 32 * LD];
  threadgroup int orders[SIMDGROUPS * 32];
  threadgroup float* tile = tiles + simdgroup * 32 * LD;
  threadgroup int* order = orders + simdgroup * 32;
  const uint first = thread_index / 32 * (32 / WIDTH);
  if (first >= batch) {
    return;
  }
  const int count = min(batch - first, uint(32 / WIDTH));
  const int row = int(lane % WIDTH);
  const int height = int(m);
  const int width = int(n);

  load_rows<WIDTH, LD>(A + ulong(first) * (m * n), height, width, width, count, lane, tile);
  // the rows are in the tile
  simdgroup_barrier(mem_flags::mem_threadgroup);
  const bool mine = int(lane / WIDTH) < count && row < height;
  const factored_row<WIDTH> found =
      factor_in_lanes<WIDTH>(tile + lane * LD, mine, height, width, row, ushort(lane - row));
  order[lane - row + found.position] = lane;
  // the factors are in the tile
  simdgroup_barrier(mem_flags::mem_threadgroup);
  const int k = min(height, width);
  write_factors<LD, WIDTH>(
      tile, order, height, width, count, lane, 32, rows + ulong(first) * m,
      L + ulong(first) * (m * k), U + ulong(first) * (k * n));
  if (row == 0 && mine) {
    info[first + lane / WIDTH] = found.info;
  }
}

[[max_total_threads_per_threadgroup(64)]] kernel void lu_threadgroup(
    device const float* A [[buffer(0)]],
    device long* rows [[buffer(1)]],
    device float* L [[buffer(2)]],
    device float* U [[buffer(3)]],
    device int* info [[buffer(4)]],
    constant uint& m [[buffer(5)]],
    constant uint& n [[buffer(6)]],
    uint matrix [[threadgroup_position_in_grid]],
    uint row [[thread_position_in_threadgroup]]) {
  threadgroup float a[4160];
  threadgroup float found[4];
  threadgroup int place[4];
  threadgroup int order[64];
  const int height = int(m);
  const int width = int(n);
  A += ulong(matrix) * (m * n);
  for (int e = row; e < height * width; e += 64) {
    a[e / width * 65 + e % width] = A[e];
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
      a, order, height, width, 1, row, 64, rows + ulong(matrix) * m, L + ulong(matrix) * (m * k),
      U + ulong(matrix) * (k * n));
  if (row == 0) {
    info[matrix] = failed;
  }
}

// Factors columns first..last of A [m, n] from row `first` on, one matrix per threadgroup, into the
// columns panel[j]. Each thread has the rows of its own that are a threadgroup's size apart. Step p
// swaps rows p and pivots[p]. `rows` and info may be those from before the panel.
template <int PANEL>
[[max_total_threads_per_threadgroup(256)]] kernel void lu_panel(
    device const float* A [[buffer(0)]],
    device const long* rows_before [[buffer(1)]],
    device const int* info_before [[buffer(2)]],
    device float* panel [[buffer(3)]],
    device int* pivots [[buffer(4)]],
    device long* rows [[buffer(5)]],
    device int* info [[buffer(6)]],
    constant uint& m [[buffer(7)]],
    constant uint& n [[buffer(8)]],
    constant uint& first [[buffer(9)]],
    constant uint& last [[buffer(10)]],
    uint matrix [[threadgroup_position_in_grid]],
    uint thread_index [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup float found[64];
  threadgroup int place[64];
  const uint height = m - first;
  const int h = int(height);
  const int w = int(last - first);
  const uint lane = thread_index % 32;
  A += ulong(matrix) * (m * n) + first * (n + 1);
  panel += ulong(matrix) * (height * w);
  rows_before += ulong(matrix) * m + first;
  rows += ulong(matrix) * m + first;
  for (int i = thread_index; i < h; i += threads) {
    for (int j = 0; j < w; ++j) {
      panel[j * height + i] = A[i * n + j];
    }
    rows[i] = first == 0 ? i : rows_before[i];
  }
  int failed = first == 0 ? 0 : info_before[matrix];
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
    failed = failed == 0 && pivot == 0.0f ? int(first) + p + 1 : failed;
    if (thread_index == 0) {
      pivots[matrix * PANEL + p] = q;
      const long row = rows[p];
      rows[p] = rows[q];
      rows[q] = row;
    }
  }
  if (thread_index == 0) {
    info[matrix] = failed;
  }
}

// Swaps rows of the columns of A [m, n] beside the panel of columns first..last, and turns those
// after it into U = L^-1 A. One thread per column. LU may be A.
template <int PANEL>
[[max_total_threads_per_threadgroup(128)]] kernel void lu_columns(
    device const int* pivots [[buffer(0)]],
    device const float* A [[buffer(1)]],
    device float* LU [[buffer(2)]],
    constant uint& m [[buffer(3)]],
    constant uint& n [[buffer(4)]],
    constant uint& first [[buffer(5)]],
    constant uint& last [[buffer(6)]],
    uint2 position [[thread_position_in_grid]],
    uint2 in_group [[thread_position_in_threadgroup]],
    uint2 group [[threads_per_threadgroup]]) {
  threadgroup float L[PANEL * PANEL];
  const int steps = int(last - first);
  const ulong top = ulong(position.y) * (m * n) + first * n;
  A += top;
  load_padded(A + first, n, steps, PANEL, in_group.x, group.x, L);
  // the panel's L is there
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint column = position.x;
  if (column >= n || (column >= first && column < last)) {
    return;
  }
  A += column;
  LU += top + column;
  pivots += position.y * PANEL;
  for (int p = 0; p < steps; ++p) {
    const uint q = pivots[p];
    LU[p * n] = A[p * n];
    LU[q * n] = A[q * n];
  }
  for (int p = 0; p < steps; ++p) {
    const uint q = pivots[p];
    const float value = LU[p * n];
    LU[p * n] = LU[q * n];
    LU[q * n] = value;
  }
  if (column >= last) {
    const int rows = padded(steps);
    float x[PANEL];
#pragma unroll
    for (int i = 0; i < PANEL; ++i) {
      x[i] = i < steps ? LU[i * n] : 0.0f;
    }
    solve_in_thread<PANEL>(L, substitute(rows, PANEL, true, false, true), rows, x);
#pragma unroll
    for (int i = 0; i < PANEL; ++i) {
      const int row = i - (PANEL - rows);
      if (row >= 0 && row < steps) {
        LU[row * n] = x[i];
      }
    }
  }
}

// L and U of A, which has both, one thread per value of it.
[[max_total_threads_per_threadgroup(128)]] kernel void lu_finish(
    device const float* A [[buffer(0)]],
    device float* L [[buffer(1)]],
    device float* U [[buffer(2)]],
    constant uint& m [[buffer(3)]],
    constant uint& n [[buffer(4)]],
    uint3 position [[thread_position_in_grid]]) {
  const uint column = position.x;
  const uint row = position.y;
  const uint k = min(m, n);
  if (column >= n) {
    return;
  }
  const ulong matrix = position.z;
  const float value = A[matrix * (m * n) + row * n + column];
  if (column < k) {
    L[matrix * (m * k) + row * k + column] = column < row ? value : column == row ? 1.0f : 0.0f;
  }
  if (row < k) {
    U[matrix * (k * n) + row * n + column] = column < row ? 0.0f : value;
  }
}

// Column i of P has its one in row rows[i]. One thread per value.
template <typename T>
[[max_total_threads_per_threadgroup(128)]] kernel void lu_permutation(
    device const long* rows [[buffer(0)]],
    device T* P [[buffer(1)]],
    constant uint& m [[buffer(2)]],
    uint3 position [[thread_position_in_grid]]) {
  const uint column = position.x;
  if (column < m) {
    const ulong matrix = position.z;
    const bool here = rows[matrix * m + column] == position.y;
    P[matrix * (m * m) + position.y * m + column] = here ? T(1.0f) : T(0.0f);
  }
}
