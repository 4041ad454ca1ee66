// SPDX-License-Identifier: MIT
// Orthonormal rows of W [K, M], K <= M: W = L^-1 W with L L^T = W W^T, again and again. Products,
// factors and quotients are pairs of floats: with rounded ones, what is small in W would be lost. A
// pass takes six digits off the condition; rows that are zero are replaced by random ones.
//
// orthogonalize_load: W from A. orthogonalize_gram: parts of W W^T, each over some columns of W.
// orthogonalize_factor: some columns of L. orthogonalize_divide: L^-1 W. orthogonalize_excess: what
// is left of W W^T - I.

#include "float_pairs.h"
#include "reduce.h"

// the square of the sine of an angle between a row and those before it, at least: smaller ones are
// lost in the roundings of W W^T
constant float kFloor = 0x1p-40f;
// the square of the length of a row of which roundings alone are left; whole rows have 1 or more
constant float kZero = 0x1p-80f;
// more than this is left of W W^T - I only where the condition is too large for all passes
constant float kFar = 0x1p-8f;

// Row k of W: column k of A [M, K] with a largest value of 1. One threadgroup per row.
template <typename T>
[[max_total_threads_per_threadgroup(256)]] kernel void orthogonalize_load(
    device const T* A [[buffer(0)]],
    device float* W [[buffer(1)]],
    constant uint& K [[buffer(2)]],
    constant uint& M [[buffer(3)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint2 position [[thread_position_in_threadgroup]],
    uint2 threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[32];
  A += ulong(group.y) * (M * K) + group.x;
  W += ulong(group.y * K + group.x) * M;
  float largest = 0.0f;
  for (uint i = position.x; i < M; i += threads.x) {
    largest = max(largest, abs(float(A[i * K])));
  }
  largest = threadgroup_max(largest, scratch, position.x, threads.x);
  const float scale = largest != 0.0f ? largest : 1.0f;
  for (uint i = position.x; i < M; i += threads.x) {
    W[i] = float(A[i * K]) / scale;
  }
}

// Entry (i, j) of W W^T, the sum of its parts.
inline two_floats gram_entry(device const float* parts, uint count, uint K, uint i, uint j) {
  const uint size = K * K;
  parts += i * K + j;
  two_floats sum = {0.0f, 0.0f};
  for (uint part = 0; part < count; ++part) {
    sum = added(sum, {parts[0], parts[size]});
    parts += 2 * ulong(size);
  }
  return sum;
}

// A tile of TILE x TILE entries on or below the diagonal, over `share` columns of W: one
// threadgroup. The high and the low parts of all entries follow each other.
template <int TILE>
[[max_total_threads_per_threadgroup(TILE * TILE)]] kernel void orthogonalize_gram(
    device const float* W [[buffer(0)]],
    device float* parts [[buffer(1)]],
    constant uint& K [[buffer(2)]],
    constant uint& M [[buffer(3)]],
    constant uint& share [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint3 position [[thread_position_in_threadgroup]]) {
  threadgroup float rows[TILE * 33];
  threadgroup float columns[TILE * 33];
  // tile t of the triangle, by rows
  uint top = 0;
  while ((top + 1) * (top + 2) / 2 <= group.x) {
    ++top;
  }
  const uint left = group.x - top * (top + 1) / 2;
  const uint thread_index = position.x;
  const uint i = thread_index / TILE;
  const uint j = thread_index % TILE;
  const uint begin = group.y * share;
  const uint end = min(M, begin + share);
  W += ulong(group.z) * (K * M);
  two_floats sum = {0.0f, 0.0f};
  for (uint first = begin; first < end; first += 32) {
    // the tiles before are read
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint e = thread_index; e < TILE * 32; e += TILE * TILE) {
      const uint m = first + e % 32;
      const uint row = top * TILE + e / 32;
      const uint column = left * TILE + e / 32;
      rows[e / 32 * 33 + e % 32] = row < K && m < end ? W[row * M + m] : 0.0f;
      columns[e / 32 * 33 + e % 32] = column < K && m < end ? W[column * M + m] : 0.0f;
    }
    // both tiles are there
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint m = 0; m < 32; ++m) {
      sum = accumulated(sum, rows[i * 33 + m], columns[j * 33 + m]);
    }
  }
  sum = normalised(sum);
  const uint row = top * TILE + i;
  const uint column = left * TILE + j;
  if (row < K && column < K) {
    parts += ulong(group.z * groups.y + group.y) * 2 * (K * K) + row * K + column;
    parts[0] = sum.high;
    parts[K * K] = sum.low;
  }
}

inline two_floats get(threadgroup const float* high, threadgroup const float* low, uint i) {
  return {high[i], low[i]};
}

inline void put(threadgroup float* high, threadgroup float* low, uint i, two_floats x) {
  high[i] = x.high;
  low[i] = x.low;
}

// Columns first.. of L, BLOCK of them, from those before: a threadgroup takes the rows of the
// diagonal block and BLOCK of those below, of which it writes its own.
template <int BLOCK>
[[max_total_threads_per_threadgroup(256)]] kernel void orthogonalize_factor(
    device const float* parts [[buffer(0)]],
    device const float* L [[buffer(1)]],
    device const float* low [[buffer(2)]],
    device float* L_next [[buffer(3)]],
    device float* low_next [[buffer(4)]],
    device int* zeros [[buffer(5)]],
    constant uint& count [[buffer(6)]],
    constant uint& K [[buffer(7)]],
    constant uint& first [[buffer(8)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint2 position [[thread_position_in_threadgroup]],
    uint2 threads [[threads_per_threadgroup]]) {
  constexpr uint LD = BLOCK + 1;
  threadgroup float c[2 * BLOCK * (BLOCK + 1)];
  threadgroup float c_low[2 * BLOCK * (BLOCK + 1)];
  threadgroup float lengths[BLOCK];
  const uint thread_index = position.x;
  const ulong matrix = ulong(group.y) * (K * K);
  parts += matrix * 2 * count;
  L += matrix;
  low += matrix;
  L_next += matrix;
  low_next += matrix;
  zeros += group.y * K;
  const uint below = first + (group.x + 1) * BLOCK;
  const uint width = min(uint(BLOCK), K - first);
  const uint height = BLOCK + min(uint(BLOCK), K - min(K, below));
  for (uint e = thread_index; e < height * BLOCK; e += threads.x) {
    const uint r = e / BLOCK;
    const uint row = r < BLOCK ? first + r : below + r - BLOCK;
    const uint column = first + e % BLOCK;
    two_floats x = {0.0f, 0.0f};
    if (row < K && column <= row && column < K) {
      x = gram_entry(parts, count, K, row, column);
      if (row == column) {
        lengths[r] = x.high;
      }
      for (uint k = 0; k < first; ++k) {
        const two_floats y = {L[row * K + k], low[row * K + k]};
        x = less_product(x, y, {L[column * K + k], low[column * K + k]});
      }
    }
    put(c, c_low, r * LD + e % BLOCK, x);
  }
  for (uint k = 0; k < width; ++k) {
    // column k is as the step before left it
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const two_floats pivot = get(c, c_low, k * LD + k);
    const two_floats floor = {kFloor * lengths[k], 0.0f};
    const two_floats one = {1.0f, 0.0f};
    const bool zero = lengths[k] < kZero;
    // later rows keep what they have of a row that is not known well
    const bool lost = pivot.high < floor.high || zero;
    const two_floats diagonal = zero ? one : root(lost ? floor : pivot);
    // every thread has the pivot
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint r = k + thread_index; r < height; r += threads.x) {
      const two_floats none = {0.0f, 0.0f};
      const two_floats x = lost ? none : divided(get(c, c_low, r * LD + k), diagonal);
      put(c, c_low, r * LD + k, r == k ? diagonal : x);
    }
    if (thread_index == 0 && group.x == 0) {
      zeros[first + k] = zero ? 1 : 0;
    }
    // column k is that of L
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint e = thread_index; e < height * BLOCK; e += threads.x) {
      const uint r = e / BLOCK;
      const uint j = e % BLOCK;
      if (j > k && j < width && r >= j) {
        const two_floats left = get(c, c_low, r * LD + k);
        const two_floats right = get(c, c_low, j * LD + k);
        put(c, c_low, r * LD + j, less_product(get(c, c_low, r * LD + j), left, right));
      }
    }
  }
  for (uint e = thread_index; e < height * BLOCK; e += threads.x) {
    const uint r = e / BLOCK;
    const uint row = r < BLOCK ? first + r : below + r - BLOCK;
    const uint column = first + e % BLOCK;
    if ((r >= BLOCK || group.x == 0) && row < K && column <= row && column < K) {
      L_next[row * K + column] = c[r * LD + e % BLOCK];
      low_next[row * K + column] = c_low[r * LD + e % BLOCK];
    }
  }
}

// A value in -1 to 1 for each index: the finaliser of MurmurHash3.
inline float random_value(uint index) {
  uint bits = index + 1;
  bits = (bits ^ (bits >> 16)) * 0x85ebca6bu;
  bits = (bits ^ (bits >> 13)) * 0xc2b2ae35u;
  bits ^= bits >> 16;
  return float(int(bits)) * 0x1p-31f;
}

// Rows first.. and columns from `column` on, ROWS x 32, of L to a tile, with zeros past its sides.
template <int ROWS>
inline void load_tile(
    device const float* L,
    device const float* low,
    threadgroup float* tile,
    threadgroup float* tile_low,
    uint K,
    uint first,
    uint column,
    uint thread_index,
    uint threads) {
  // the tile before is read
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint e = thread_index; e < ROWS * 32; e += threads) {
    const uint i = first + e / 32;
    const uint j = column + e % 32;
    const bool inside = i < K && j <= i;
    tile[e] = inside ? L[i * K + j] : 0.0f;
    tile_low[e] = inside ? low[i * K + j] : 0.0f;
  }
  // the tile is there
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Where a thread of orthogonalize_divide writes its column, and the tile on the diagonal of L.
struct divided_column {
  threadgroup const float* tile;
  threadgroup const float* tile_low;
  device const int* zeros;
  device float* next;
  device float* next_low;
  uint M;
  uint m;
  uint first;
  bool inside;
};

// Steps from..to of the tile, rows from `from` on in x: each takes the first of them off, so that
// registers have the same place in all.
template <int ROWS, int LENGTH>
inline void divide_rows(thread const divided_column& c, int from, int to, thread two_floats* x) {
  for (int k = from; k < to; ++k) {
    const two_floats y = divided(x[0], get(c.tile, c.tile_low, k * 33));
#pragma unroll
    for (int i = 1; i < LENGTH; ++i) {
      // what comes from beyond the last row stays there
      x[i - 1] = less_product(x[i], get(c.tile, c.tile_low, (k + i) % ROWS * 32 + k), y);
    }
    if (c.inside) {
      const uint at = (c.first + k) * c.M;
      c.next[at] = c.zeros[c.first + k] != 0 ? random_value(at + c.m) : y.high;
      c.next_low[at] = y.low;
    }
  }
}

// next = L^-1 W, with random values for rows of zeros: one thread per column of W, ROWS values of
// it at a time in registers. `next_low` has the low parts of those before.
template <int ROWS>
[[max_total_threads_per_threadgroup(64)]] kernel void orthogonalize_divide(
    device const float* W [[buffer(0)]],
    device const float* L [[buffer(1)]],
    device const float* low [[buffer(2)]],
    device const int* zeros [[buffer(3)]],
    device float* next [[buffer(4)]],
    device float* next_low [[buffer(5)]],
    constant uint& K [[buffer(6)]],
    constant uint& M [[buffer(7)]],
    uint2 position [[thread_position_in_grid]],
    uint2 own_place [[thread_position_in_threadgroup]],
    uint2 threads [[threads_per_threadgroup]]) {
  threadgroup float tile[ROWS * 32];
  threadgroup float tile_low[ROWS * 32];
  const uint m = position.x;
  const bool inside = m < M;
  const uint thread_index = own_place.x;
  const ulong values = ulong(position.y) * (K * M) + m;
  W += values;
  next += values;
  next_low += values;
  L += ulong(position.y) * (K * K);
  low += ulong(position.y) * (K * K);
  zeros += position.y * K;
  for (uint first = 0; first < K; first += ROWS) {
    const int rows = min(K - first, uint(ROWS));
    two_floats x[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      x[i] = {inside && i < rows ? W[(first + i) * M] : 0.0f, 0.0f};
    }
    for (uint column = 0; column < first; column += 32) {
      load_tile<ROWS>(L, low, tile, tile_low, K, first, column, thread_index, threads.x);
      for (uint k = 0; k < 32 && column + k < first; ++k) {
        const uint at = (column + k) * M;
        const two_floats y = {inside ? next[at] : 0.0f, inside ? next_low[at] : 0.0f};
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
          x[i] = less_product(x[i], get(tile, tile_low, i * 32 + k), y);
        }
      }
    }
    load_tile<ROWS>(L, low, tile, tile_low, K, first, first, thread_index, threads.x);
    const divided_column c = {tile, tile_low, zeros, next, next_low, M, m, first, inside};
    divide_rows<ROWS, ROWS>(c, 0, min(rows, ROWS / 2), x);
    divide_rows<ROWS, ROWS / 2>(c, ROWS / 2, rows, x);
  }
}

// P: what of W is to be subtracted, P W, to make W W^T the identity; one thread per entry.
[[max_total_threads_per_threadgroup(256)]] kernel void orthogonalize_excess(
    device const float* parts [[buffer(0)]],
    device float* P [[buffer(1)]],
    constant uint& count [[buffer(2)]],
    constant uint& K [[buffer(3)]],
    constant uint& values [[buffer(4)]],
    uint index [[thread_position_in_grid]]) {
  if (index >= values) {
    return;
  }
  const uint row = index / K;
  const uint i = row % K;
  const uint j = index % K;
  float excess = 0.0f;
  if (j <= i) {
    const two_floats sum = gram_entry(parts + ulong(row / K) * count * 2 * (K * K), count, K, i, j);
    excess = i == j ? 0.5f * ((sum.high - 1.0f) + sum.low) : sum.high + sum.low;
  }
  // what the passes could not make orthonormal shall not look as if they had
  P[index] = abs(excess) < kFar ? excess : NAN;
}
