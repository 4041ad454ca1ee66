// SPDX-License-Identifier: MIT
// A X = B by P A = L U with partial pivoting: L Y = P B, then U X = Y.
//
// solve_simdgroup: n <= WIDTH, one matrix per WIDTH lanes, a row in each lane's registers.
// solve_threadgroup: n <= 64, one matrix per threadgroup of 64 threads, in threadgroup memory.
// Both read A once, and take STRIP or 32 right sides at a time. solve_residual: B - A X, one thread
// per value, in twice the precision. solve_add: X + D, one thread per value.

#include "lu.h"

// Right sides that a simdgroup holds in threadgroup memory, and a lane in registers, at a time.
constant constexpr int STRIP = 16;
constant constexpr int COLUMNS = 4;

template <int WIDTH, int SIMDGROUPS>
[[max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] kernel void solve_simdgroup(
    device const float* A [[buffer(0)]],
    device const float* B [[buffer(1)]],
    device float* X [[buffer(2)]],
    device int* info [[buffer(3)]],
    constant uint& batch [[buffer(4)]],
    constant uint& n [[buffer(5)]],
    constant uint& k [[buffer(6)]],
    uint thread_index [[thread_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int LD = WIDTH + 1;
  threadgroup float a_tiles[SIMDGROUPS * 32 * LD];
  threadgroup float b_tiles[SIMDGROUPS * 32 * (STRIP + 1)];
  threadgroup int orders[SIMDGROUPS * 32];
  threadgroup float* tile = b_tiles + simdgroup * 32 * (STRIP + 1);
  threadgroup int* order = orders + simdgroup * 32;
  const uint first = thread_index / 32 * (32 / WIDTH);
  if (first >= batch) {
    return;
  }
  const int count = min(batch - first, uint(32 / WIDTH));
  const int row = int(lane % WIDTH);
  const ushort base = ushort(lane - row);
  const int rows = int(n);
  const int sides = int(k);
  const bool mine = int(lane / WIDTH) < count && row < rows;

  threadgroup float* a = a_tiles + simdgroup * 32 * LD;
  load_rows<WIDTH, LD>(A + ulong(first) * (n * n), rows, rows, rows, count, lane, a);
  // the rows of A are in the tile
  simdgroup_barrier(mem_flags::mem_threadgroup);
  a += lane * LD;
  const factored_row<WIDTH> found = factor_in_lanes<WIDTH>(a, mine, rows, rows, row, base);
  const int position = found.position;
  const float pivot = mine ? a[position] : 1.0f;
  order[base + position] = lane;
  if (row == 0 && mine) {
    info[first + lane / WIDTH] = found.info;
  }

  B += ulong(first) * (n * k);
  X += ulong(first) * (n * k);
  for (int strip = 0; strip < sides; strip += STRIP) {
    const int width = min(sides - strip, STRIP);
    // nothing of the tile is still to be read
    simdgroup_barrier(mem_flags::mem_threadgroup);
    load_rows<WIDTH, STRIP + 1>(B + strip, rows, width, sides, count, lane, tile);
    // the rows of B are in the tile
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int c = 0; c < width; c += COLUMNS) {
      threadgroup float* own = tile + lane * (STRIP + 1) + c;
      float b[COLUMNS];
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) {
        b[j] = mine && c + j < width ? own[j] : 0.0f;
      }
      for (int p = 0; p < rows; ++p) {
        const ushort from = lane_where<WIDTH>(position == p, base);
        const float l = a[p];
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
          const float y = simd_shuffle(b[j], from);
          b[j] = position > p ? b[j] - l * y : b[j];
        }
      }
      for (int p = rows - 1; p >= 0; --p) {
        const ushort from = lane_where<WIDTH>(position == p, base);
        const float u = a[p];
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
          b[j] = position == p ? b[j] / pivot : b[j];
          const float x = simd_shuffle(b[j], from);
          b[j] = position < p ? b[j] - u * x : b[j];
        }
      }
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) {
        if (c + j < width) {
          own[j] = b[j];
        }
      }
    }
    // the solution is in the tile, its rows as those of A
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int e = lane; e < count * rows * width; e += 32) {
      const int r = e / width;
      const int from = order[r / rows * WIDTH + r % rows];
      X[r * sides + strip + e % width] = tile[from * (STRIP + 1) + e % width];
    }
  }
}

[[max_total_threads_per_threadgroup(64)]] kernel void solve_threadgroup(
    device const float* A [[buffer(0)]],
    device const float* B [[buffer(1)]],
    device float* X [[buffer(2)]],
    device int* info [[buffer(3)]],
    constant uint& n [[buffer(4)]],
    constant uint& k [[buffer(5)]],
    uint matrix [[threadgroup_position_in_grid]],
    uint row [[thread_position_in_threadgroup]]) {
  threadgroup float a[4160];
  threadgroup float b[2112];
  threadgroup float found[4];
  threadgroup int place[4];
  threadgroup int order[64];
  const int rows = int(n);
  A += ulong(matrix) * (n * n);
  for (int e = row; e < rows * rows; e += 64) {
    a[e / rows * 65 + e % rows] = A[e];
  }
  // the matrix is in threadgroup memory
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int position;
  int failed;
  factor_in_threadgroup(a, found, place, rows, rows, row, position, failed);
  order[position] = row;
  if (row == 0) {
    info[matrix] = failed;
  }

  threadgroup const float* own_a = a + row * 65;
  threadgroup float* own_b = b + row * 33;
  B += ulong(matrix) * (n * k);
  X += ulong(matrix) * (n * k);
  for (uint strip = 0; strip < k; strip += 32) {
    const int width = min(k - strip, 32u);
    for (int e = row; e < rows * width; e += 64) {
      b[e / width * 33 + e % width] = B[e / width * k + strip + e % width];
    }
    for (int p = 0; p < rows; ++p) {
      // row p is as the step before left it
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (position > p && position < rows) {
        threadgroup const float* y = b + order[p] * 33;
        for (int c = 0; c < width; ++c) {
          own_b[c] -= own_a[p] * y[c];
        }
      }
    }
    for (int p = rows - 1; p > 0; --p) {
      // row p is as the step before left it
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (position < p) {
        threadgroup const float* y = b + order[p] * 33;
        const float pivot = a[order[p] * 65 + p];
        for (int c = 0; c < width; ++c) {
          own_b[c] -= own_a[p] * (y[c] / pivot);
        }
      }
    }
    // no row is still to be read without its division by the pivot
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int c = 0; c < width && position < rows; ++c) {
      own_b[c] /= own_a[position];
    }
    // the solution is there, its rows as those of A
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int e = row; e < rows * width; e += 64) {
      X[e / width * k + strip + e % width] = b[order[e / width] * 33 + e % width];
    }
    // the next right sides take the place of these
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// here, because products above may be contracted
#include "float_pairs.h"

// R = B - A X, summed up in pairs of floats: one thread per value.
[[max_total_threads_per_threadgroup(256)]] kernel void solve_residual(
    device const float* A [[buffer(0)]],
    device const float* X [[buffer(1)]],
    device const float* B [[buffer(2)]],
    device float* R [[buffer(3)]],
    constant uint& n [[buffer(4)]],
    constant uint& k [[buffer(5)]],
    constant uint& values [[buffer(6)]],
    uint e [[thread_position_in_grid]]) {
  if (e >= values) {
    return;
  }
  const uint row = e / k;
  device const float* a = A + ulong(row) * n;
  device const float* x = X + ulong(row / n) * (n * k) + e % k;
  two_floats sum = {B[e], 0.0f};
  for (uint i = 0; i < n; ++i) {
    sum = accumulated(sum, -a[i], x[i * k]);
  }
  R[e] = sum.high + sum.low;
}

// X = Y + D, where X may be Y.
[[max_total_threads_per_threadgroup(256)]] kernel void solve_add(
    device const float* Y [[buffer(0)]],
    device const float* D [[buffer(1)]],
    device float* X [[buffer(2)]],
    constant uint& values [[buffer(3)]],
    uint i [[thread_position_in_grid]]) {
  if (i < values) {
    X[i] = Y[i] + D[i];
  }
}
