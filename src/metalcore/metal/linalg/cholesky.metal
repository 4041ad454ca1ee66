// SPDX-License-Identifier: MIT
// A = L L^T. info is 0, or the order of the first leading minor that is not positive.
//
// cholesky_simdgroup: n <= 32, WIDTH lanes per matrix, each with a row in registers.
// cholesky_threadgroup: n <= 64, one threadgroup per matrix, a thread per row. Larger matrices by
// blocks of 64 columns: cholesky_threadgroup for the block on the diagonal, cholesky_panel for the
// rows below it, a matrix product for the rest, and cholesky_finish for zeros above the diagonal.
// Only the lower triangle of A is read.

#include "triangular.h"

// Columns first..last of the rows that stand in WIDTH lanes from `base` on, this one's in `done`
// and its values from `first` on in `a`: each step takes the first of them off the registers, so
// that they have the same place in all.
template <int LENGTH>
inline void factor_in_lanes(
    thread float* a,
    threadgroup float* done,
    int first,
    int last,
    ushort lane,
    ushort base,
    thread int& failed) {
  for (int j = first; j < last; ++j) {
    const float pivot = simd_shuffle(a[0], ushort(base + j));
    failed = failed == 0 && !(pivot > 0.0f) ? j + 1 : failed;
    const float root = precise::sqrt(pivot);
    const float l = lane == j ? root : a[0] / root;
    done[j] = j <= lane ? l : 0.0f;
#pragma unroll
    for (int k = 1; k < LENGTH; ++k) {
      // what comes from beyond the last row ends beyond the last column
      a[k - 1] = a[k] - l * simd_shuffle(l, ushort((base + j + k) % 32));
    }
    a[LENGTH - 1] = 0.0f;
  }
}

template <int WIDTH, int SIMDGROUPS>
[[max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] kernel void cholesky_simdgroup(
    device const float* A [[buffer(0)]],
    device float* L [[buffer(1)]],
    device int* info [[buffer(2)]],
    constant uint& matrices [[buffer(3)]],
    constant uint& n [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    ushort thread_lane [[thread_index_in_simdgroup]]) {
  constexpr int SHARE = 32 / WIDTH;
  // an odd length, so that lanes that read a column each use a bank of their own
  constexpr int LD = WIDTH + 1;
  threadgroup float tile[SIMDGROUPS * 32 * LD];
  const uint first = (group * SIMDGROUPS + simdgroup) * SHARE;
  if (first >= matrices) {
    return;
  }
  const int count = min(matrices - first, uint(SHARE));
  const int rows = int(n);
  threadgroup float* a = tile + simdgroup * SHARE * WIDTH * LD;
  for (int m = 0; m < count; ++m) {
    load_square(A + ulong(first + m) * (n * n), n, rows, LD, thread_lane, 32, a + m * WIDTH * LD);
  }
  // each lane now reads a row that others stored
  simdgroup_barrier(mem_flags::mem_threadgroup);

  // lanes without a matrix factor zeros, and store nothing
  const int own_matrix = int(thread_lane) / WIDTH;
  const bool owns = own_matrix < count;
  const ushort lane = thread_lane % WIDTH;
  const ushort base = thread_lane - lane;
  threadgroup float* row = a + thread_lane * LD;
  float l[WIDTH];
#pragma unroll
  for (int j = 0; j < WIDTH; ++j) {
    l[j] = owns && j <= lane && lane < rows ? row[j] : 0.0f;
  }
  int failed = 0;
  factor_in_lanes<WIDTH>(l, row, 0, min(rows, WIDTH / 2), lane, base, failed);
  factor_in_lanes<WIDTH / 2>(l, row, WIDTH / 2, rows, lane, base, failed);
  // each lane now writes out what others stored
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int m = 0; m < count; ++m) {
    store_square(a + m * WIDTH * LD, LD, rows, n, thread_lane, 32, L + ulong(first + m) * (n * n));
  }
  if (owns && lane == 0) {
    info[first + own_matrix] = failed;
  }
}

// The block of n columns that starts at `start` of each matrix of order `order`; zeros above its
// diagonal. L may be A, and info, which is as the blocks before this one left it, info_before.
template <int ROWS>
[[max_total_threads_per_threadgroup(ROWS)]] kernel void cholesky_threadgroup(
    device const float* A [[buffer(0)]],
    device const int* info_before [[buffer(1)]],
    device float* L [[buffer(2)]],
    device int* info [[buffer(3)]],
    constant uint& n [[buffer(4)]],
    constant uint& start [[buffer(5)]],
    constant uint& order [[buffer(6)]],
    uint matrix [[threadgroup_position_in_grid]],
    uint i [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  constexpr int LD = ROWS + 1;
  threadgroup float tile[ROWS * LD];
  threadgroup float pivots[ROWS];
  const int rows = int(n);
  const ulong offset = ulong(matrix) * (order * order) + start * (order + 1);
  load_square(A + offset, order, rows, LD, i, threads, tile);
  // each thread now reads a row that others stored
  threadgroup_barrier(mem_flags::mem_threadgroup);

  threadgroup float* row = tile + i * LD;
  int failed = 0;
  for (int j = 0; j < rows; ++j) {
    float sum = 0.0f;
    if (int(i) >= j && int(i) < rows) {
      sum = row[j];
      for (int k = 0; k < j; ++k) {
        sum -= row[k] * tile[j * LD + k];
      }
      if (int(i) == j) {
        pivots[j] = sum;
      }
    }
    // the pivot is there, and row j is read
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float pivot = pivots[j];
    failed = failed == 0 && !(pivot > 0.0f) ? j + 1 : failed;
    const float root = precise::sqrt(pivot);
    if (int(i) < rows) {
      row[j] = int(i) < j ? 0.0f : int(i) == j ? root : sum / root;
    }
    // column j of the next row is there
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  store_square(tile, LD, rows, order, i, threads, L + offset);
  if (i == 0) {
    const int before = start == 0 ? 0 : info_before[matrix];
    info[matrix] = before != 0 || failed == 0 ? before : int(start) + failed;
  }
}

// Rows below the block of columns at `start`, which is factored: l = a L11^-T. A simdgroup takes 32
// rows, a thread solves one of them, 32 values at a time in registers. L may be A.
template <int COLUMNS>
[[max_total_threads_per_threadgroup(32)]] kernel void cholesky_panel(
    device const float* A [[buffer(0)]],
    device float* L [[buffer(1)]],
    constant uint& start [[buffer(2)]],
    constant uint& order [[buffer(3)]],
    uint2 group [[threadgroup_position_in_grid]],
    ushort lane [[thread_index_in_simdgroup]]) {
  constexpr int LD = COLUMNS + 1;
  threadgroup float block[COLUMNS * COLUMNS];
  threadgroup float tile[32 * LD];
  A += ulong(group.y) * (order * order);
  L += ulong(group.y) * (order * order);
  load_square(A + start * (order + 1), order, COLUMNS, COLUMNS, lane, 32, block);
  const uint first = start + COLUMNS + 32 * group.x;
  const int rows = min(order - first, 32u);
  for (int e = lane; e < rows * COLUMNS; e += 32) {
    const int i = e / COLUMNS;
    tile[i * LD + e % COLUMNS] = A[(first + i) * order + start + e % COLUMNS];
  }
  // each lane now reads what others stored
  simdgroup_barrier(mem_flags::mem_threadgroup);
  const substitution s = substitute(COLUMNS, COLUMNS, true, false, false);
  threadgroup float* row = tile + lane * LD;
  for (int done = 0; done < COLUMNS && lane < rows; done += 32) {
    float x[32];
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      x[j] = row[done + j];
    }
    for (int k = 0; k < done; ++k) {
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        x[j] -= block[(done + j) * COLUMNS + k] * row[k];
      }
    }
    solve_in_thread<32>(block, from_row(s, done), 32, x);
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      row[done + j] = x[j];
    }
  }
  // each lane now writes out what others stored
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int e = lane; e < rows * COLUMNS; e += 32) {
    const int i = e / COLUMNS;
    L[(first + i) * order + start + e % COLUMNS] = tile[i * LD + e % COLUMNS];
  }
}

// L = the lower triangle of A, one thread per value. L may be A.
[[max_total_threads_per_threadgroup(128)]] kernel void cholesky_finish(
    device const float* A [[buffer(0)]],
    device float* L [[buffer(1)]],
    constant uint& n [[buffer(2)]],
    uint3 position [[thread_position_in_grid]]) {
  const uint column = position.x;
  const uint row = position.y;
  if (column >= n) {
    return;
  }
  const ulong at = ulong(position.z) * (n * n) + row * n + column;
  L[at] = column <= row ? A[at] : 0.0f;
}
