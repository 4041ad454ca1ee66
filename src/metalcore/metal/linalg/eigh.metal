// SPDX-License-Identifier: MIT
// A = Q diag(L) Q^T, L ascending, by two-sided Jacobi rotations: Q^T A Q loses its elements off the
// diagonal in pairs of rows and columns, all disjoint pairs of a round at the same time.
//
// N <= 32: a team of 8, 16 or 32 lanes per matrix. N <= 64: one threadgroup per matrix. Both keep
// the lower triangle of A and the columns of Q in threadgroup memory, and read and write a matrix
// once. Larger: A is cut into blocks; eigh_block finds the rotation of each disjoint pair of
// blocks, a problem of N <= 64, and eigh_rotate_rows and eigh_rotate_columns apply it.
//
// Matrices are scaled by a power of two to a largest element of 1/2 to 1.

#include <metal_simdgroup_matrix>

#include "symmetric_jacobi.h"

// the sweeps that a matrix may take
constant constexpr int kSweeps = 24;

// One simdgroup per threadgroup, N lanes per matrix.
template <uint N, bool VECTORS>
[[max_total_threads_per_threadgroup(32)]] kernel void eigh_simdgroup(
    device const float* A [[buffer(0)]],
    device float* L [[buffer(1)]],
    device float* Q [[buffer(2)]],
    device int* info [[buffer(3)]],
    constant uint& batch [[buffer(4)]],
    constant uint& n [[buffer(5)]],
    uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_position_in_threadgroup]]) {
  constexpr uint TEAMS = 32 / N;
  threadgroup float a[16 * (N + 1)];
  threadgroup float v[32 * (N + 1)];
  threadgroup float s[16];
  threadgroup float h[16];
  threadgroup uint pairs[16];
  threadgroup uint order[32];
  threadgroup uint active[8];
  const uint team = thread_index / N;
  const problem at = {
      a + team * (N * (N + 1) / 2),
      v + team * (N * (N + 1)),
      s + team * (N / 2),
      h + team * (N / 2),
      pairs + team * (N / 2),
      n + n % 2,
      N + 1,
      thread_index % N,
      N};
  // a team without a matrix has zeros, and keeps the result to itself
  const uint first = group * TEAMS;
  const ulong values = ulong(first) * (n * n);
  const uint count = min(TEAMS, batch - first);
  load(v, N + 1, N, TEAMS, A + values, count, n, thread_index, 32);
  const int exponent = prepare<VECTORS>(at, n, s);
  const bool converged =
      diagonalise<N, TEAMS, VECTORS>(at, active, team, 0x1p-24f / float(n), kSweeps);
  const bool own = team < count;
  store_values(at, own, n, exponent, order + team * N, L + ulong(first + team) * n);
  if (own && at.lane == 0) {
    info[first + team] = converged && exponent != kPoisoned ? 0 : int(n);
  }
  if (VECTORS) {
    store_vectors(v, N + 1, N, order, count, n, Q + values, thread_index, 32);
  }
}

// One threadgroup per matrix, n <= N <= 64.
template <uint N, bool VECTORS>
[[max_total_threads_per_threadgroup(256)]] kernel void eigh_threadgroup(
    device const float* A [[buffer(0)]],
    device float* L [[buffer(1)]],
    device float* Q [[buffer(2)]],
    device int* info [[buffer(3)]],
    constant uint& n [[buffer(4)]],
    uint matrix [[threadgroup_position_in_grid]],
    uint lane [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  threadgroup float a[N * (N + 1) / 2];
  threadgroup float v[N * (N + 1)];
  threadgroup float s[N / 2];
  threadgroup float h[N / 2];
  threadgroup uint pairs[N / 2];
  threadgroup uint order[N];
  threadgroup uint active[2];
  const ulong first = ulong(matrix) * (n * n);
  const problem at = {a, v, s, h, pairs, n + n % 2, N + 1, lane, lanes};
  load(v, N + 1, N, 1, A + first, 1, n, lane, lanes);
  const int exponent = prepare<VECTORS>(at, n, s);
  const bool converged = diagonalise<N, 1, VECTORS>(at, active, 0, 0x1p-24f / float(n), kSweeps);
  store_values(at, true, n, exponent, order, L + ulong(matrix) * n);
  if (lane == 0) {
    info[matrix] = converged && exponent != kPoisoned ? 0 : int(n);
  }
  if (VECTORS) {
    store_vectors(v, N + 1, N, order, 1, n, Q + first, lane, lanes);
  }
}

// The largest element in each row of the lower triangle: one simdgroup per row.
[[max_total_threads_per_threadgroup(32)]] kernel void eigh_row_max(
    device const float* A [[buffer(0)]],
    device float* largest [[buffer(1)]],
    constant uint& n [[buffer(2)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_position_in_threadgroup]]) {
  float own = 0.0f;
  A += ulong(row) * n;
  for (uint i = lane; i <= row % n; i += 32) {
    own = max(own, magnitude(A[i]));
  }
  own = simd_max(own);
  if (lane == 0) {
    largest[row] = own;
  }
}

// W: A scaled, symmetric, with zeros to the size `padded`; V: the identity; squares: the sum of
// those in each row. One simdgroup per row.
template <bool VECTORS>
[[max_total_threads_per_threadgroup(32)]] kernel void eigh_pad(
    device const float* A [[buffer(0)]],
    device const float* largest [[buffer(1)]],
    device float* W [[buffer(2)]],
    device float* V [[buffer(3)]],
    device float* squares [[buffer(4)]],
    device int* exponents [[buffer(5)]],
    constant uint& n [[buffer(6)]],
    constant uint& padded [[buffer(7)]],
    uint index [[threadgroup_position_in_grid]],
    uint lane [[thread_position_in_threadgroup]]) {
  const uint matrix = index / padded;
  const uint row = index % padded;
  float all = 0.0f;
  for (uint i = lane; i < n; i += 32) {
    all = max(all, largest[matrix * n + i]);
  }
  const int exponent = exponent_of(simd_max(all));
  float sum = 0.0f;
  A += ulong(matrix) * (n * n);
  W += ulong(index) * padded;
  V += VECTORS ? ulong(index) * padded : 0;
  for (uint i = lane; i < padded; i += 32) {
    const bool inside = row < n && i < n;
    const uint at = max(row, i) * n + min(row, i);
    const float x = inside ? scaled(A[inside ? at : 0], exponent) : 0.0f;
    sum += x * x;
    W[i] = x;
    if (VECTORS) {
      V[i] = i == row ? 1.0f : 0.0f;
    }
  }
  sum = simd_sum(sum);
  if (lane == 0) {
    squares[index] = sum;
  }
  if (row == 0 && lane == 0) {
    exponents[matrix] = exponent;
  }
}

// Where row i of the problem of a pair of blocks is in the matrix.
template <uint BLOCK>
inline uint row_of(uint2 pair, uint i) {
  return (i < BLOCK ? pair.x : pair.y) * BLOCK + i % BLOCK;
}

// One threadgroup per pair of blocks: J^T of the pair, and in `active` 0 where it is the identity,
// 2 where far from it.
template <uint BLOCK>
[[max_total_threads_per_threadgroup(256)]] kernel void eigh_block(
    device const float* W [[buffer(0)]],
    device const float* squares [[buffer(1)]],
    device float* J [[buffer(2)]],
    device int* active [[buffer(3)]],
    constant uint& n [[buffer(4)]],
    constant uint& padded [[buffer(5)]],
    constant uint& round [[buffer(6)]],
    constant uint& sweeps [[buffer(7)]],
    uint index [[threadgroup_position_in_grid]],
    uint lane [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  constexpr uint N = 2 * BLOCK;
  threadgroup float a[N * (N + 1) / 2];
  threadgroup float v[N * (N + 1)];
  threadgroup float s[BLOCK];
  threadgroup float h[BLOCK];
  threadgroup uint pairs[BLOCK];
  threadgroup uint flags[2];
  const uint blocks = padded / BLOCK;
  const uint matrix = index / (blocks / 2);
  const uint2 pair = round_robin_pair(index % (blocks / 2), round, blocks);
  const problem at = {a, v, s, h, pairs, N, N + 1, lane, lanes};
  // above what rounding in eigh_rotate_* brings back; all below it together have a norm of at most
  // 2^-22 sqrt(n) of that of A
  float square = 0.0f;
  for (uint i = lane % 32; i < n; i += 32) {
    square += squares[matrix * padded + i];
  }
  const float threshold = 0x1p-22f * precise::sqrt(simd_sum(square) / float(n));
  device const float* from = W + ulong(matrix) * (padded * padded);
  float largest = 0.0f;
  for (uint i = lane; i < N * N; i += lanes) {
    const uint row = i / N;
    const uint column = i % N;
    if (column <= row) {
      const float x = from[row_of<BLOCK>(pair, row) * padded + row_of<BLOCK>(pair, column)];
      a[lower(row, column)] = x;
      largest = max(largest, column < row ? abs(x) : 0.0f);
    }
  }
  largest = team_max(largest, s, lane, lanes);
  const bool rotates = largest > threshold;
  if (lane == 0) {
    active[index] = rotates ? (largest > 8.0f * threshold ? 2 : 1) : 0;
  }
  if (rotates) {
    set_identity(at);
    diagonalise<N, 1, true>(at, flags, 0, threshold, int(sweeps));
    J += ulong(index) * (N * N);
    for (uint i = lane; i < N * N; i += lanes) {
      J[i] = v[i / N * at.ld + i % N];
    }
  }
}

// Which pair, and which of the `strips` of some rows or columns, a simdgroup rotates.
struct strip {
  uint matrix, number, turn;
  uint2 pair;
};

inline strip strip_of(uint index, uint strips, uint blocks, uint round) {
  strip at;
  at.number = index % strips;
  at.turn = index / strips;
  at.matrix = at.turn / (blocks / 2);
  at.pair = round_robin_pair(at.turn % (blocks / 2), round, blocks);
  return at;
}

// next = J^T W in the rows of each pair that rotates: a simdgroup takes STRIP columns.
template <uint BLOCK, uint STRIP>
[[max_total_threads_per_threadgroup(32)]] kernel void eigh_rotate_rows(
    device const float* W [[buffer(0)]],
    device const float* J [[buffer(1)]],
    device const int* active [[buffer(2)]],
    device float* next [[buffer(3)]],
    constant uint& padded [[buffer(4)]],
    constant uint& round [[buffer(5)]],
    uint index [[threadgroup_position_in_grid]]) {
  constexpr uint N = 2 * BLOCK;
  constexpr uint ROWS = N / 8;
  constexpr uint COLUMNS = STRIP / 8;
  const strip at = strip_of(index, padded / STRIP, padded / BLOCK, round);
  if (active[at.turn] == 0) {
    return;
  }
  const ulong first = ulong(at.matrix) * (padded * padded) + at.number * STRIP;
  device const float* turn = J + ulong(at.turn) * (N * N);
  simdgroup_float8x8 x[ROWS][COLUMNS];
  for (uint r = 0; r < ROWS; ++r) {
    for (uint j = 0; j < COLUMNS; ++j) {
      simdgroup_load(x[r][j], W + first + row_of<BLOCK>(at.pair, r * 8) * padded + j * 8, padded);
    }
  }
  for (uint i = 0; i < ROWS; ++i) {
    simdgroup_float8x8 sum[COLUMNS];
    for (uint j = 0; j < COLUMNS; ++j) {
      sum[j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    for (uint r = 0; r < ROWS; ++r) {
      simdgroup_float8x8 factor;
      simdgroup_load(factor, turn + i * 8 * N + r * 8, N);
      for (uint j = 0; j < COLUMNS; ++j) {
        simdgroup_multiply_accumulate(sum[j], factor, x[r][j], sum[j]);
      }
    }
    for (uint j = 0; j < COLUMNS; ++j) {
      simdgroup_store(
          sum[j], next + first + row_of<BLOCK>(at.pair, i * 8) * padded + j * 8, padded);
    }
  }
}

// next = W J and next_V = V J in the columns of each pair that rotates: a simdgroup takes STRIP
// rows, of W or of V. Without VECTORS there are none for V.
template <uint BLOCK, uint STRIP, bool VECTORS>
[[max_total_threads_per_threadgroup(32)]] kernel void eigh_rotate_columns(
    device const float* W [[buffer(0)]],
    device const float* V [[buffer(1)]],
    device const float* J [[buffer(2)]],
    device const int* active [[buffer(3)]],
    device float* next [[buffer(4)]],
    device float* next_V [[buffer(5)]],
    constant uint& padded [[buffer(6)]],
    constant uint& round [[buffer(7)]],
    uint index [[threadgroup_position_in_grid]]) {
  constexpr uint N = 2 * BLOCK;
  constexpr uint ROWS = STRIP / 8;
  constexpr uint COLUMNS = N / 8;
  constexpr uint SIDES = VECTORS ? 2 : 1;
  const strip at = strip_of(index / SIDES, padded / STRIP, padded / BLOCK, round);
  if (active[at.turn] == 0) {
    return;
  }
  const ulong first = ulong(at.matrix * padded + at.number * STRIP) * padded;
  device const float* from = (index % SIDES == 0 ? W : V) + first;
  device float* to = (index % SIDES == 0 ? next : next_V) + first;
  device const float* turn = J + ulong(at.turn) * (N * N);
  simdgroup_float8x8 x[ROWS][COLUMNS];
  for (uint i = 0; i < ROWS; ++i) {
    for (uint r = 0; r < COLUMNS; ++r) {
      simdgroup_load(x[i][r], from + i * 8 * padded + row_of<BLOCK>(at.pair, r * 8), padded);
    }
  }
  for (uint j = 0; j < COLUMNS; ++j) {
    simdgroup_float8x8 sum[ROWS];
    for (uint i = 0; i < ROWS; ++i) {
      sum[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    for (uint r = 0; r < COLUMNS; ++r) {
      simdgroup_float8x8 factor;
      simdgroup_load(factor, turn + j * 8 * N + r * 8, N, ulong2(0, 0), true);
      for (uint i = 0; i < ROWS; ++i) {
        simdgroup_multiply_accumulate(sum[i], x[i][r], factor, sum[i]);
      }
    }
    for (uint i = 0; i < ROWS; ++i) {
      simdgroup_store(sum[i], to + i * 8 * padded + row_of<BLOCK>(at.pair, j * 8), padded);
    }
  }
}

// Eigenvalues in ascending order, where each was, and info: one thread per eigenvalue.
[[max_total_threads_per_threadgroup(32)]] kernel void eigh_order(
    device const float* W [[buffer(0)]],
    device const int* exponents [[buffer(1)]],
    device const int* active [[buffer(2)]],
    device float* L [[buffer(3)]],
    device int* order [[buffer(4)]],
    device int* info [[buffer(5)]],
    constant uint& batch [[buffer(6)]],
    constant uint& n [[buffer(7)]],
    constant uint& padded [[buffer(8)]],
    constant uint& rounds [[buffer(9)]],
    constant uint& pairs [[buffer(10)]],
    uint index [[thread_position_in_grid]]) {
  const uint matrix = index / n;
  const uint i = index % n;
  if (matrix >= batch) {
    return;
  }
  device const float* from = W + ulong(matrix) * (padded * padded);
  const int exponent = exponents[matrix];
  const float value = from[i * (padded + 1)];
  uint rank = 0;
  for (uint j = 0; j < n; ++j) {
    const float other = from[j * (padded + 1)];
    rank += other < value || (other == value && j < i) ? 1 : 0;
  }
  L[matrix * n + rank] = exponent == kPoisoned ? NAN : ldexp(value, exponent);
  order[matrix * n + rank] = int(i);
  if (i == 0) {
    // what the last sweep still found far from diagonal has not converged
    int rotated = 0;
    for (uint j = 0; j < rounds * pairs; ++j) {
      rotated += active[(j / pairs * batch + matrix) * pairs + j % pairs] > 1 ? 1 : 0;
    }
    info[matrix] = rotated == 0 && exponent != kPoisoned ? 0 : int(n);
  }
}

// Q[row, i] = V[row, order[i]]: one thread per element.
[[max_total_threads_per_threadgroup(256)]] kernel void eigh_columns(
    device const float* V [[buffer(0)]],
    device const int* order [[buffer(1)]],
    device const int* exponents [[buffer(2)]],
    device float* Q [[buffer(3)]],
    constant uint& size [[buffer(4)]],
    constant uint& n [[buffer(5)]],
    constant uint& padded [[buffer(6)]],
    uint index [[thread_position_in_grid]]) {
  if (index >= size) {
    return;
  }
  const uint matrix = index / (n * n);
  const uint row = index / n % n;
  V += ulong(matrix) * (padded * padded);
  const float value = V[row * padded + order[matrix * n + index % n]];
  Q[index] = exponents[matrix] == kPoisoned ? NAN : value;
}
