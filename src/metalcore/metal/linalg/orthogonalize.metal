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
kernel void orthogonalize_load(
    device const T* A [[buffer(0)]],
    device float* W [[buffer(1)]],
    constant long& K [[buffer(2)]],
    constant long& M [[buffer(3)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint2 position [[thread_position_in_threadgroup]],
    uint2 threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[32];
  const uint rows = uint(M);
  const uint columns = uint(K);
  A += group.y * M * K + group.x;
  W += (group.y * K + group.x) * M;
  float largest = 0.0f;
  for (uint i = position.x; i < rows; i += threads.x) {
    largest = max(largest, abs(float(A[i * columns])));
  }
  largest = threadgroup_max(largest, scratch, position.x, threads.x);
  const float scale = largest != 0.0f ? largest : 1.0f;
  for (uint i = position.x; i < rows; i += threads.x) {
    W[i] = float(A[i * columns]) / scale;
  }
}

// Entry (i, j) of W W^T, the sum of its parts.
inline two_floats gram_entry(device const float* parts, long count, long K, long i, long j) {
  two_floats sum = {0.0f, 0.0f};
  for (long part = 0; part < count; ++part) {
    const long at = part * 2 * K * K + i * K + j;
    sum = added(sum, {parts[at], parts[at + K * K]});
  }
  return sum;
}

// A tile of TILE x TILE entries on or below the diagonal, over `share` columns of W: one
// threadgroup. The high and the low parts of all entries follow each other.
template <int TILE>
kernel void orthogonalize_gram(
    device const float* W [[buffer(0)]],
    device float* parts [[buffer(1)]],
    constant long& K [[buffer(2)]],
    constant long& M [[buffer(3)]],
    constant long& share [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint3 position [[thread_position_in_threadgroup]]) {
  threadgroup float rows[TILE * 33];
  threadgroup float columns[TILE * 33];
  // tile t of the triangle, by rows
  long top = 0;
  while ((top + 1) * (top + 2) / 2 <= long(group.x)) {
    ++top;
  }
  const long left = long(group.x) - top * (top + 1) / 2;
  const uint thread_index = position.x;
  const uint i = thread_index / TILE;
  const uint j = thread_index % TILE;
  const long begin = group.y * share;
  const long end = min(M, begin + share);
  W += group.z * K * M;
  two_floats sum = {0.0f, 0.0f};
  for (long first = begin; first < end; first += 32) {
    // the tiles before are read
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint e = thread_index; e < TILE * 32; e += TILE * TILE) {
      const long m = first + e % 32;
      const long row = top * TILE + e / 32;
      const long column = left * TILE + e / 32;
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
  const long row = top * TILE + i;
  const long column = left * TILE + j;
  if (row < K && column < K) {
    const long at = (group.z * groups.y + group.y) * 2 * K * K + row * K + column;
    parts[at] = sum.high;
    parts[at + K * K] = sum.low;
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
kernel void orthogonalize_factor(
    device const float* parts [[buffer(0)]],
    device const float* L [[buffer(1)]],
    device const float* low [[buffer(2)]],
    device float* L_next [[buffer(3)]],
    device float* low_next [[buffer(4)]],
    device int* zeros [[buffer(5)]],
    constant long& count [[buffer(6)]],
    constant long& K [[buffer(7)]],
    constant long& first [[buffer(8)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint2 position [[thread_position_in_threadgroup]],
    uint2 threads [[threads_per_threadgroup]]) {
  constexpr uint LD = BLOCK + 1;
  threadgroup float c[2 * BLOCK * (BLOCK + 1)];
  threadgroup float c_low[2 * BLOCK * (BLOCK + 1)];
  threadgroup float lengths[BLOCK];
  const uint thread_index = position.x;
  parts += group.y * count * 2 * K * K;
  L += group.y * K * K;
  low += group.y * K * K;
  L_next += group.y * K * K;
  low_next += group.y * K * K;
  zeros += group.y * K;
  const long below = first + (group.x + 1) * BLOCK;
  const uint width = uint(min(long(BLOCK), K - first));
  const uint height = BLOCK + uint(clamp(K - below, 0l, long(BLOCK)));
  for (uint e = thread_index; e < height * BLOCK; e += threads.x) {
    const uint r = e / BLOCK;
    const long row = r < BLOCK ? first + r : below + r - BLOCK;
    const long column = first + e % BLOCK;
    two_floats x = {0.0f, 0.0f};
    if (row < K && column <= row && column < K) {
      x = gram_entry(parts, count, K, row, column);
      if (row == column) {
        lengths[r] = x.high;
      }
      for (long k = 0; k < first; ++k) {
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
    const long row = r < BLOCK ? first + r : below + r - BLOCK;
    const long column = first + e % BLOCK;
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
    long K,
    long first,
    long column,
    uint thread_index,
    uint threads) {
  // the tile before is read
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint e = thread_index; e < ROWS * 32; e += threads) {
    const long i = first + e / 32;
    const long j = column + e % 32;
    const bool inside = i < K && j <= i;
    tile[e] = inside ? L[i * K + j] : 0.0f;
    tile_low[e] = inside ? low[i * K + j] : 0.0f;
  }
  // the tile is there
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// next = L^-1 W, with random values for rows of zeros: one thread per column of W, ROWS values of
// it at a time in registers. `next_low` has the low parts of those before.
template <int ROWS>
kernel void orthogonalize_divide(
    device const float* W [[buffer(0)]],
    device const float* L [[buffer(1)]],
    device const float* low [[buffer(2)]],
    device const int* zeros [[buffer(3)]],
    device float* next [[buffer(4)]],
    device float* next_low [[buffer(5)]],
    constant long& K [[buffer(6)]],
    constant long& M [[buffer(7)]],
    uint2 position [[thread_position_in_grid]],
    uint2 own_place [[thread_position_in_threadgroup]],
    uint2 threads [[threads_per_threadgroup]]) {
  threadgroup float tile[ROWS * 32];
  threadgroup float tile_low[ROWS * 32];
  const long m = position.x;
  const bool inside = m < M;
  const uint thread_index = own_place.x;
  W += position.y * K * M + m;
  next += position.y * K * M + m;
  next_low += position.y * K * M + m;
  L += position.y * K * K;
  low += position.y * K * K;
  zeros += position.y * K;
  for (long first = 0; first < K; first += ROWS) {
    const int rows = int(min(K - first, long(ROWS)));
    two_floats x[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      x[i] = {inside && i < rows ? W[(first + i) * M] : 0.0f, 0.0f};
    }
    for (long column = 0; column < first; column += 32) {
      load_tile<ROWS>(L, low, tile, tile_low, K, first, column, thread_index, threads.x);
      for (uint k = 0; k < 32 && column + k < first; ++k) {
        const long at = (column + k) * M;
        const two_floats y = {inside ? next[at] : 0.0f, inside ? next_low[at] : 0.0f};
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
          x[i] = less_product(x[i], get(tile, tile_low, i * 32 + k), y);
        }
      }
    }
    load_tile<ROWS>(L, low, tile, tile_low, K, first, first, thread_index, threads.x);
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
      if (k < rows) {
        x[k] = divided(x[k], get(tile, tile_low, k * 33));
#pragma unroll
        for (int i = k + 1; i < ROWS; ++i) {
          x[i] = less_product(x[i], get(tile, tile_low, i * 32 + k), x[k]);
        }
        if (inside) {
          const long at = (first + k) * M;
          next[at] = zeros[first + k] != 0 ? random_value(uint(at + m)) : x[k].high;
          next_low[at] = x[k].low;
        }
      }
    }
  }
}

// P: what of W is to be subtracted, P W, to make W W^T the identity; one thread per entry.
kernel void orthogonalize_excess(
    device const float* parts [[buffer(0)]],
    device float* P [[buffer(1)]],
    constant long& count [[buffer(2)]],
    constant long& K [[buffer(3)]],
    constant long& values [[buffer(4)]],
    uint index [[thread_position_in_grid]]) {
  if (long(index) >= values) {
    return;
  }
  const long i = index / K % K;
  const long j = index % K;
  float excess = 0.0f;
  if (j <= i) {
    const two_floats sum = gram_entry(parts + index / (K * K) * count * 2 * K * K, count, K, i, j);
    excess = i == j ? 0.5f * ((sum.high - 1.0f) + sum.low) : sum.high + sum.low;
  }
  // what the passes could not make orthonormal shall not look as if they had
  P[index] = abs(excess) < kFar ? excess : NAN;
}
