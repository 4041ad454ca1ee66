// SPDX-License-Identifier: MIT
// A = Q R by Householder reflectors. Columns are brought to about 1 by powers of two first, so that
// no square over- or underflows, and R's columns back at the end.
//
// qr_simdgroup: up to 32 rows and columns; a column stands in the registers of a lane, which get
// the reflector by shuffles. qr_threadgroup: a matrix in threadgroup memory, its columns dealt out
// to simdgroups. Larger ones: qr_scale once, then qr_panel for each 32 columns, whose reflectors
// matrix products apply to the rest; qr_finish takes R out of what they leave.

#include "householder.h"

// SHARE matrices per simdgroup, SIZE lanes each, and at most SIMDGROUPS of them per threadgroup.
// They are contiguous, so they are read and written through threadgroup memory.
template <int SIZE, int SIMDGROUPS>
[[max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] kernel void qr_simdgroup(
    device const float* A [[buffer(0)]],
    device float* Q [[buffer(1)]],
    device float* R [[buffer(2)]],
    constant uint& matrices [[buffer(3)]],
    constant uint& m [[buffer(4)]],
    constant uint& n [[buffer(5)]],
    constant uint& q_columns [[buffer(6)]],
    constant uint& r_rows [[buffer(7)]],
    uint thread_index [[thread_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  constexpr int SHARE = 32 / SIZE;
  threadgroup float tiles[SIMDGROUPS * 32 * SIZE];
  threadgroup float* tile = tiles + simdgroup * 32 * SIZE;
  const uint first = thread_index / 32 * SHARE;
  if (first >= matrices) {
    return;
  }
  const int count = min(matrices - first, uint(SHARE));
  const int rows = int(m);
  const int columns = int(n);
  const int steps = min(rows, columns);
  const int size = rows * columns;
  A += ulong(first) * size;
  for (int e = lane; e < count * size; e += 32) {
    tile[e] = A[e];
  }
  // each lane now reads a column that others stored
  simdgroup_barrier(mem_flags::mem_threadgroup);

  // lanes without a matrix compute with the last one, and store nothing
  const int matrix = min(int(lane) / SIZE, count - 1);
  const bool owns = int(lane) / SIZE < count;
  const int c = lane % SIZE;
  const ushort base = lane - c;
  float a[SIZE];
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < SIZE; ++i) {
    a[i] = i < rows && c < columns ? tile[matrix * size + i * columns + c] : 0.0f;
    largest = max(largest, abs(a[i]));
  }
  const float scale = power_of_two_for(largest);
#pragma unroll
  for (int i = 0; i < SIZE; ++i) {
    a[i] *= scale;
  }

  // every lane has read its column: the tile is free
  simdgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup float* factors = tile + (lane - c) * SIZE;
  const float tau_of_column = factor_columns<SIZE>(a, steps, c, base, scale, factors);
#pragma unroll
  for (int i = 0; i < SIZE; ++i) {
    a[i] = factors[i * SIZE + c];
  }

  // every lane has its column back
  simdgroup_barrier(mem_flags::mem_threadgroup);
  const int r_height = int(r_rows);
  const int r_size = r_height * columns;
#pragma unroll
  for (int i = 0; i < SIZE; ++i) {
    if (owns && i < r_height && c < columns) {
      tile[matrix * r_size + i * columns + c] = i <= c ? a[i] : 0.0f;
    }
  }
  // each lane now writes out what others stored
  simdgroup_barrier(mem_flags::mem_threadgroup);
  R += ulong(first) * r_size;
  for (int e = lane; e < count * r_size; e += 32) {
    R[e] = tile[e];
  }
  if (q_columns == 0) {
    return;
  }

  // R has left the tile
  simdgroup_barrier(mem_flags::mem_threadgroup);
  float q[SIZE];
#pragma unroll
  for (int i = 0; i < SIZE; ++i) {
    factors[i * SIZE + c] = a[i];
    q[i] = i == c ? 1.0f : 0.0f;
  }
  // each lane now reads reflectors that others stored
  simdgroup_barrier(mem_flags::mem_threadgroup);
  apply_q<SIZE>(q, factors, tau_of_column, steps, base);

  // every lane has read the reflectors
  simdgroup_barrier(mem_flags::mem_threadgroup);
  const int width = int(q_columns);
#pragma unroll
  for (int i = 0; i < SIZE; ++i) {
    if (owns && i < rows && c < width) {
      tile[matrix * rows * width + i * width + c] = q[i];
    }
  }
  // each lane now writes out what others stored
  simdgroup_barrier(mem_flags::mem_threadgroup);
  Q += ulong(first) * (rows * width);
  for (int e = lane; e < count * rows * width; e += 32) {
    Q[e] = tile[e];
  }
}

// One threadgroup per matrix, in rows of an odd length: lanes that read a column use a bank each.
// Every simdgroup finds the reflector by itself from the column as it is,
// so a step needs one barrier; v is that column times `inverse`.
template <int VALUES, int COLUMNS, int REFLECTORS>
[[max_total_threads_per_threadgroup(256)]] kernel void qr_threadgroup(
    device const float* A [[buffer(0)]],
    device float* Q [[buffer(1)]],
    device float* R [[buffer(2)]],
    constant uint& m [[buffer(3)]],
    constant uint& n [[buffer(4)]],
    constant uint& q_columns [[buffer(5)]],
    constant uint& r_rows [[buffer(6)]],
    uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float w[VALUES];
  threadgroup float scales[COLUMNS];
  threadgroup float taus[REFLECTORS];
  threadgroup float betas[REFLECTORS];
  threadgroup float inverses[REFLECTORS];
  const int rows = int(m);
  const int columns = int(n);
  const int width = int(q_columns);
  const int steps = min(rows, columns);
  const int ld = max(columns, width) | 1;
  A += ulong(group) * (m * n);
  for (int e = thread_index; e < rows * columns; e += threads) {
    w[e / columns * ld + e % columns] = A[e];
  }
  // all of A is there
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int j = simdgroup; j < columns; j += simdgroups) {
    float largest = 0.0f;
    for (int i = lane; i < rows; i += 32) {
      largest = max(largest, abs(w[i * ld + j]));
    }
    const float scale = power_of_two_for(simd_max(largest));
    for (int i = lane; i < rows; i += 32) {
      w[i * ld + j] *= scale;
    }
    if (lane == 0) {
      scales[j] = scale;
    }
  }

  for (int k = 0; k < steps; ++k) {
    // column k is as its simdgroup left it
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float tail = 0.0f;
    for (int i = lane; i < rows; i += 32) {
      const float x = w[i * ld + k];
      tail += i > k ? x * x : 0.0f;
    }
    const Reflector h = reflector_from(w[k * ld + k], simd_sum(tail));
    if (thread_index == 0) {
      taus[k] = h.tau;
      betas[k] = h.beta;
      inverses[k] = h.inverse;
    }
    // columns keep their simdgroup: the first one after k that is this one's
    for (int j = k + 1 + (simdgroup + simdgroups - (k + 1) % simdgroups) % simdgroups; j < columns;
         j += simdgroups) {
      float dot = 0.0f;
      for (int i = lane; i < rows; i += 32) {
        const float v = i == k ? 1.0f : w[i * ld + k] * h.inverse;
        dot += i >= k ? v * w[i * ld + j] : 0.0f;
      }
      dot = h.tau * simd_sum(dot);
      for (int i = lane; i < rows; i += 32) {
        const float v = i == k ? 1.0f : w[i * ld + k] * h.inverse;
        w[i * ld + j] -= i >= k ? dot * v : 0.0f;
      }
    }
  }

  // all of R is there
  threadgroup_barrier(mem_flags::mem_threadgroup);
  R += ulong(group) * (r_rows * n);
  for (int e = thread_index; e < int(r_rows) * columns; e += threads) {
    const int i = e / columns;
    const int j = e % columns;
    const float r = i < j ? w[i * ld + j] : i == j ? betas[i] : 0.0f;
    R[e] = r / scales[j];
  }
  if (width == 0) {
    return;
  }

  // the columns that R does not have
  for (int j = simdgroup; j < width; j += simdgroups) {
    for (int i = lane; j >= steps && i < rows; i += 32) {
      w[i * ld + j] = i == j ? 1.0f : 0.0f;
    }
  }
  // Step k applies reflector k to the columns after it, in which Q takes the place of R. Column
  // k + 1 is still that of its reflector, which no one reads any more.
  for (int k = steps - 1; k >= -1; --k) {
    const float tau = k < 0 ? 0.0f : taus[k];
    const float inverse = k < 0 ? 0.0f : inverses[k];
    const float tau_after = k + 1 < steps ? taus[k + 1] : 0.0f;
    const float inverse_after = k + 1 < steps ? inverses[k + 1] : 0.0f;
    for (int j = k + 1 + (simdgroup + simdgroups - (k + 1) % simdgroups) % simdgroups; j < width;
         j += simdgroups) {
      const bool fresh = j == k + 1 && j < steps;
      float dot = 0.0f;
      for (int i = lane; i < rows; i += 32) {
        if (fresh) {
          const float v = i == j ? 1.0f : i > j ? w[i * ld + j] * inverse_after : 0.0f;
          w[i * ld + j] = (i == j ? 1.0f : 0.0f) - tau_after * v;
        }
        dot += k >= 0 && i > k ? w[i * ld + k] * inverse * w[i * ld + j] : 0.0f;
      }
      dot = tau * simd_sum(dot);
      for (int i = lane; i < rows; i += 32) {
        if (k >= 0 && i >= k) {
          const float v = i == k ? 1.0f : w[i * ld + k] * inverse;
          w[i * ld + j] = (i == k ? 0.0f : w[i * ld + j]) - dot * v;
        }
      }
    }
    // its simdgroup replaces column k next
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  Q += ulong(group) * (m * q_columns);
  for (int e = thread_index; e < rows * width; e += threads) {
    Q[e] = w[e / width * ld + e % width];
  }
}

// W = A scale, one threadgroup per 32 columns.
template <int LANES>
[[max_total_threads_per_threadgroup(1024)]] kernel void qr_scale(
    device const float* A [[buffer(0)]],
    device float* W [[buffer(1)]],
    device float* scales [[buffer(2)]],
    constant uint& m [[buffer(3)]],
    constant uint& n [[buffer(4)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint2 position [[thread_position_in_threadgroup]],
    uint2 threads [[threads_per_threadgroup]]) {
  threadgroup float largest_of[1024];
  const uint lane = position.x % LANES;
  const uint simdgroup = position.x / LANES;
  const uint simdgroups = threads.x / LANES;
  const uint column = group.x * LANES + lane;
  const ulong first = ulong(group.y) * (m * n) + column;
  A += first;
  W += first;
  float largest = 0.0f;
  for (uint i = simdgroup; column < n && i < m; i += simdgroups) {
    largest = max(largest, abs(A[i * n]));
  }
  largest_of[simdgroup * LANES + lane] = largest;
  // every simdgroup needs the shares of all
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint s = 0; s < simdgroups; ++s) {
    largest = max(largest, largest_of[s * LANES + lane]);
  }
  const float scale = power_of_two_for(largest);
  for (uint i = simdgroup; column < n && i < m; i += simdgroups) {
    W[i * n] = A[i * n] * scale;
  }
  if (simdgroup == 0 && column < n) {
    scales[group.y * n + column] = scale;
  }
}

// One threadgroup factors the columns first.. of A from row `first` on, up to 32 of them: a lane
// per column, and the rows dealt out to simdgroups. W, which may be A, gets R there and the tails
// of the reflectors below it. Also V, dense, and the T of I - V T V^T.
// One sweep over the rows applies reflector k and takes the dots of column k + 1 with all others:
// those give the next reflector, what it does to later columns, and a column of T.
template <int LANES>
[[max_total_threads_per_threadgroup(1024)]] kernel void qr_panel(
    device const float* A [[buffer(0)]],
    device float* W [[buffer(1)]],
    device float* V [[buffer(2)]],
    device float* T [[buffer(3)]],
    constant uint& m [[buffer(4)]],
    constant uint& n [[buffer(5)]],
    constant uint& first [[buffer(6)]],
    constant uint& width [[buffer(7)]],
    uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  // in turns of two: the barrier of one sweep guards the half that the next reuses
  threadgroup float dots[2048];
  threadgroup float pivots[64];
  threadgroup float t[1056];
  const int rows = int(m - first);
  const int columns = int(width);
  const int column = lane;
  const bool inside = column < columns;
  const ulong corner = ulong(group) * (m * n) + first * (n + 1) + column;
  A += corner;
  W += corner;
  V += ulong(group) * (rows * width) + column;
  T += ulong(group) * (width * width) + column * width;
  for (int l = 0; simdgroup == 0 && l < LANES; ++l) {
    t[column * 33 + l] = 0.0f;
  }

  Reflector h = {0.0f, 0.0f, 0.0f};
  float pull = 0.0f;
  for (int k = -1; k < columns; ++k) {
    // the sweep of k = 0 is the first that writes
    device const float* a = k > 0 ? W : A;
    const int turn = (k + 1) % 2 * 1024;
    const ushort next = min(k + 1, LANES - 1);
    float dot = 0.0f;
    for (int i = simdgroup; i < rows; i += simdgroups) {
      if (i < k) {
        continue;
      }
      float x = inside ? a[i * n] : 0.0f;
      const float v = i == k ? 1.0f : simd_shuffle(x, max(k, 0)) * h.inverse;
      if (k >= 0) {
        x = column > k ? x - pull * v : column < k ? x : i == k ? h.beta : v;
        if (inside && column >= k) {
          W[i * n] = x;
        }
      }
      dot += i > k + 1 ? simd_shuffle(x, next) * x : 0.0f;
      if (i == k + 1) {
        pivots[turn / 32 + column] = x;
      }
    }
    if (k + 1 == columns) {
      break;
    }
    dots[turn + simdgroup * LANES + column] = dot;
    // every simdgroup needs the shares of all
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float total = 0.0f;
    for (uint s = 0; s < simdgroups; ++s) {
      total += dots[turn + s * LANES + column];
    }
    const float pivot = pivots[turn / 32 + column];
    h = reflector_from(simd_shuffle(pivot, next), simd_shuffle(total, next));
    const float projection = pivot + h.inverse * total;
    pull = h.tau * projection;
    if (simdgroup == 0) {
      float above = 0.0f;
      for (int l = 0; l <= k; ++l) {
        above += t[column * 33 + l] * simd_shuffle(projection, ushort(l));
      }
      t[column * 33 + k + 1] = column == k + 1 ? h.tau : column <= k ? -h.tau * above : 0.0f;
    }
  }

  for (int i = simdgroup; inside && i < rows; i += simdgroups) {
    V[i * width] = i > column ? W[i * n] : i == column ? 1.0f : 0.0f;
  }
  for (int l = 0; simdgroup == 0 && inside && l < columns; ++l) {
    T[l] = t[column * 33 + l];
  }
}

// R = the upper triangle of W / scales, one thread per value.
[[max_total_threads_per_threadgroup(256)]] kernel void qr_finish(
    device const float* W [[buffer(0)]],
    device const float* scales [[buffer(1)]],
    device float* R [[buffer(2)]],
    constant uint& m [[buffer(3)]],
    constant uint& r_rows [[buffer(4)]],
    constant uint& n [[buffer(5)]],
    uint3 position [[thread_position_in_grid]]) {
  const uint column = position.x;
  const uint row = position.y;
  if (column >= n) {
    return;
  }
  W += ulong(position.z) * (m * n);
  R += ulong(position.z) * (r_rows * n);
  const uint at = row * n + column;
  R[at] = row <= column ? W[at] / scales[position.z * n + column] : 0.0f;
}
