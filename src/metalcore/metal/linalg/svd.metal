// SPDX-License-Identifier: MIT
// A = U diag(S) V^T by one-sided Jacobi: rotations make the columns of A orthogonal, A V = U
// diag(S). Matrices are worked on as tall ones, M x K with M >= K, and scaled by a power of two, so
// that squares neither overflow nor matter where they underflow. Columns that end up as nothing are
// replaced by any that complete U.
//
// svd_simdgroup: M <= N, N = 8, 16 or 32. A lane per column, 32 / N matrices per simdgroup.
// Larger: columns stand as rows of Z = [X | V^T] in blocks of half a pair, which svd_begin scales;
// torch multiplies the Gram matrix of each pair of blocks, svd_pair finds the rotations that make
// it more diagonal, and torch applies them; svd_complete fills in columns of U.

#include "column_jacobi.h"
#include "reduce.h"

constant long kNotFinite = -4;

// Matrices are rows x columns; the tall one of U and V has tall_columns. They pass through `stage`,
// so that memory is read and written in order.
template <int N>
kernel void svd_simdgroup(
    device const float* A [[buffer(0)]],
    device float* U [[buffer(1)]],
    device float* S [[buffer(2)]],
    device float* V [[buffer(3)]],
    device int* info [[buffer(4)]],
    constant long& batch [[buffer(5)]],
    constant long& rows [[buffer(6)]],
    constant long& columns [[buffer(7)]],
    constant long& tall_columns [[buffer(8)]],
    constant long& vectors [[buffer(9)]],
    constant long& sweeps [[buffer(10)]],
    constant float& tolerance [[buffer(11)]],
    uint thread_index [[thread_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simd_lane [[thread_index_in_simdgroup]]) {
  constexpr int PER = 32 / N;
  threadgroup float stages[4096];
  threadgroup float* stage = stages + simdgroup * 32 * N;
  const long first = thread_index / 32 * PER;
  const long count = clamp(batch - first, 0l, long(PER));
  const long size = rows * columns;
  const bool wide = rows < columns;
  const long M = max(rows, columns);
  const long K = min(rows, columns);
  const uint lane = simd_lane % N;
  const uint base = simd_lane - lane;
  const long mine = simd_lane / N;

  for (long i = simd_lane; i < count * size; i += 32) {
    stage[i] = A[first * size + i];
  }
  // stage is read by other lanes
  simdgroup_barrier(mem_flags::mem_threadgroup);
  float x[N];
  float v[N];
  float largest = 0.0f;
  float zero = 0.0f;
  for (int i = 0; i < N; ++i) {
    const bool inside = mine < count && lane < K && i < M;
    const long at = mine * size + (wide ? lane * columns + i : i * columns + lane);
    x[i] = inside ? stage[at] : 0.0f;
    v[i] = i == int(lane) ? 1.0f : 0.0f;
    largest = max(largest, abs(x[i]));
    zero += x[i] * 0.0f;
  }
  const bool finite = lanes_sum<N>(zero) == 0.0f;
  const float power = power_of_two(lanes_max<N>(largest));
  for (int i = 0; i < N; ++i) {
    x[i] = finite ? x[i] / power : 0.0f;
  }

  float worst = 1.0f;
  for (long k = 0; k < sweeps && simd_any(worst > 0.0f); ++k) {
    worst = sweep<N>(x, v, vectors != 0, lane, tolerance);
  }

  const float norm = precise::sqrt(squared_norm<N>(x));
  const float key = lane < K ? norm : -1.0f;
  uint place = 0;
  for (ushort mask = 1; mask < N; ++mask) {
    const float other = simd_shuffle_xor(key, mask);
    place += other > key || (other == key && (lane ^ mask) < lane) ? 1 : 0;
  }
  const float nan = as_type<float>(0x7fc00000u);
  if (mine < count && lane < K) {
    S[(first + mine) * K + place] = finite ? norm * power : nan;
  }
  const bool failed = lanes_max<N>(worst) > 64.0f * tolerance;
  if (mine < count && lane == 0) {
    info[first + mine] = finite ? (failed ? 1 : 0) : kNotFinite;
  }
  if (vectors == 0) {
    return;
  }

  bool there = norm > kNothing * lanes_max<N>(norm);
  for (int i = 0; i < N; ++i) {
    x[i] = there ? x[i] / norm : 0.0f;
  }
  for (uint j = 0; j < N; ++j) {
    const bool missing = lane < tall_columns && !there;
    if (simd_any(missing && lane == j)) {
      const bool lacks = simd_shuffle(missing ? 1 : 0, base + j) != 0;
      complete_column<N>(x, there, lacks, simd_lane, base + j, M);
      there = there || (missing && lane == j);
    }
  }

  device float* tall = wide ? V : U;
  device float* square = wide ? U : V;
  const long tall_size = M * tall_columns;
  // every lane has read stage
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = 0; i < N; ++i) {
    if (mine < count && lane < tall_columns && i < M) {
      stage[mine * tall_size + i * tall_columns + place] = finite ? x[i] : nan;
    }
  }
  // stage is read by other lanes
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (long i = simd_lane; i < count * tall_size; i += 32) {
    tall[first * tall_size + i] = stage[i];
  }
  // every lane has read stage
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = 0; i < N; ++i) {
    if (mine < count && lane < K && i < K) {
      stage[(mine * K + i) * K + place] = finite ? v[i] : nan;
    }
  }
  // stage is read by other lanes
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (long i = simd_lane; i < count * K * K; i += 32) {
    square[first * K * K + i] = stage[i];
  }
}

inline float threadgroup_max(float value, threadgroup float* scratch, uint lane, uint lanes) {
  value = simd_max(value);
  if (lane % 32 == 0) {
    scratch[lane / 32] = value;
  }
  // every simdgroup's value is in scratch, and what it wrote to device memory before is there
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  return simd_max(lane % 32 < lanes / 32 ? scratch[lane % 32] : -INFINITY);
}

// Scales the first `length` values of the `rows` rows of each Z, `stride` apart. One threadgroup
// per matrix.
template <typename T>
kernel void svd_begin(
    device float* Z [[buffer(0)]],
    device float* powers [[buffer(1)]],
    device float* levels [[buffer(2)]],
    device int* info [[buffer(3)]],
    constant long& rows [[buffer(4)]],
    constant long& length [[buffer(5)]],
    constant long& stride [[buffer(6)]],
    constant long& columns [[buffer(7)]],
    uint matrix [[threadgroup_position_in_grid]],
    uint lane [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  threadgroup float scratch[64];
  Z += matrix * rows * stride;
  float largest = 0.0f;
  for (long j = 0; j < rows; ++j) {
    for (long i = lane; i < length; i += lanes) {
      const float x = abs(Z[j * stride + i]);
      largest = x < INFINITY ? max(largest, x) : INFINITY;
    }
  }
  largest = threadgroup_max(largest, scratch, lane, lanes);
  const bool finite = largest < INFINITY;
  const float power = finite ? power_of_two(largest) : 1.0f;
  float sum = 0.0f;
  for (long j = 0; j < rows; ++j) {
    for (long i = lane; i < length; i += lanes) {
      const float x = finite ? Z[j * stride + i] / power : 0.0f;
      Z[j * stride + i] = x;
      sum += x * x;
    }
  }
  sum = threadgroup_sum(sum, scratch + 32, lane, lanes);
  if (lane == 0) {
    powers[matrix] = power;
    levels[matrix] = kNothing * precise::sqrt(sum / float(columns));
    info[matrix] = finite ? 0 : kNotFinite;
  }
}

// The cosine between two columns by their Gram matrix; 0 where one of them is nothing.
inline float cosine(float pp, float qq, float pq, float level) {
  return min(pp, qq) > level * level ? abs(pq) / (precise::sqrt(pp) * precise::sqrt(qq)) : 0.0f;
}

// turns = rotations that make the Gram matrices [size, size] of pairs of blocks more diagonal, as
// rows of new columns; worst = the largest cosine that each began with. One threadgroup per pair.
template <typename T>
kernel void svd_pair(
    device const float* gram [[buffer(0)]],
    device float* turns [[buffer(1)]],
    device float* worst [[buffer(2)]],
    device const float* levels [[buffer(3)]],
    constant long& pairs [[buffer(4)]],
    constant long& size [[buffer(5)]],
    constant long& sweeps [[buffer(6)]],
    constant float& tolerance [[buffer(7)]],
    uint pair [[threadgroup_position_in_grid]],
    uint lane [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  threadgroup float G[2304];
  threadgroup float W[2304];
  threadgroup float cosines[24];
  threadgroup float sines[24];
  threadgroup float scratch[32];
  const uint n = uint(size);
  const float level = levels[pair / pairs];
  gram += pair * n * n;
  turns += pair * n * n;
  for (uint i = lane; i < n * n; i += lanes) {
    G[i] = gram[i];
    W[i] = i / n == i % n ? 1.0f : 0.0f;
  }
  // G is whole
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float largest = 0.0f;
  for (uint i = lane; i < n * n; i += lanes) {
    const uint p = i / n;
    const uint q = i % n;
    largest = max(largest, p < q ? cosine(G[p * n + p], G[q * n + q], G[i], level) : 0.0f);
  }
  largest = threadgroup_max(largest, scratch, lane, lanes);
  if (lane == 0) {
    worst[pair] = largest;
  }

  const uint rounds = largest > tolerance ? uint(sweeps) * (n - 1) : 0;
  for (uint round = 0; round < rounds; ++round) {
    for (uint k = lane; k < n / 2; k += lanes) {
      const uint2 at = round_robin_pair(k, round % (n - 1), n);
      const float pp = G[at.x * n + at.x];
      const float qq = G[at.y * n + at.y];
      const float pq = G[at.x * n + at.y];
      rotation r = {1.0f, 0.0f, 0.0f};
      if (cosine(pp, qq, pq, level) > tolerance) {
        r = jacobi_rotation(pp, qq, pq);
      }
      // the longer column comes first: a quarter turn more
      cosines[k] = pp < qq ? r.s : r.c;
      sines[k] = pp < qq ? -r.c : r.s;
    }
    // every rotation of the round is known, and G no longer read for them
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint b = lane; b < n / 2 * (n / 2); b += lanes) {
      const uint k = b / (n / 2);
      const uint l = b % (n / 2);
      const uint2 row = round_robin_pair(k, round % (n - 1), n) * n;
      const uint2 column = round_robin_pair(l, round % (n - 1), n);
      const float2 p = float2(G[row.x + column.x], G[row.x + column.y]);
      const float2 q = float2(G[row.y + column.x], G[row.y + column.y]);
      const float2 x = cosines[k] * p - sines[k] * q;
      const float2 y = sines[k] * p + cosines[k] * q;
      G[row.x + column.x] = cosines[l] * x.x - sines[l] * x.y;
      G[row.x + column.y] = sines[l] * x.x + cosines[l] * x.y;
      G[row.y + column.x] = cosines[l] * y.x - sines[l] * y.y;
      G[row.y + column.y] = sines[l] * y.x + cosines[l] * y.y;
    }
    for (uint i = lane; i < n / 2 * n; i += lanes) {
      const uint2 row = round_robin_pair(i / n, round % (n - 1), n) * n + i % n;
      const float c = cosines[i / n];
      const float s = sines[i / n];
      const float p = W[row.x];
      const float q = W[row.y];
      W[row.x] = c * p - s * q;
      W[row.y] = s * p + c * q;
    }
    // the next round reads other pairs of G, and the last one all of W
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (uint i = lane; i < n * n; i += lanes) {
    turns[i] = W[i];
  }
}

// The columns of U [rows, columns] after the first `known` ones whose norms are more than nothing:
// the unit row that the columns before leave most of, less what they hold of it, twice. A row of Ut
// is a column of U; `held` is scratch for `columns` values. One threadgroup per matrix.
template <typename T>
kernel void svd_complete(
    device float* Ut [[buffer(0)]],
    device const float* norms [[buffer(1)]],
    device const float* levels [[buffer(2)]],
    device float* held [[buffer(3)]],
    constant long& rows [[buffer(4)]],
    constant long& columns [[buffer(5)]],
    constant long& known [[buffer(6)]],
    uint matrix [[threadgroup_position_in_grid]],
    uint lane [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  threadgroup float scratch[96];
  Ut += matrix * rows * columns;
  norms += matrix * known;
  held += matrix * columns;
  long done = 0;
  while (done < known && norms[done] > levels[matrix]) {
    ++done;
  }
  for (long j = done; j < columns; ++j) {
    float most = -INFINITY;
    float best = 0.0f;
    for (long i = lane; i < rows; i += lanes) {
      float left = 1.0f;
      for (long k = 0; k < j; ++k) {
        left -= Ut[k * rows + i] * Ut[k * rows + i];
      }
      best = left > most ? float(i) : best;
      most = max(most, left);
    }
    const float winner = threadgroup_max(most, scratch, lane, lanes);
    const long row = long(threadgroup_max(most == winner ? best : 0.0f, scratch + 32, lane, lanes));
    for (long i = lane; i < rows; i += lanes) {
      float z = i == row ? 1.0f : 0.0f;
      for (long k = 0; k < j; ++k) {
        z -= Ut[k * rows + row] * Ut[k * rows + i];
      }
      Ut[j * rows + i] = z;
    }
    // the new row is read whole
    threadgroup_barrier(mem_flags::mem_device);
    for (long k = lane / 32; k < j; k += lanes / 32) {
      float dot = 0.0f;
      for (long i = lane % 32; i < rows; i += 32) {
        dot += Ut[k * rows + i] * Ut[j * rows + i];
      }
      dot = simd_sum(dot);
      if (lane % 32 == 0) {
        held[k] = dot;
      }
    }
    // every thread needs all of held
    threadgroup_barrier(mem_flags::mem_device);
    float norm = 0.0f;
    for (long i = lane; i < rows; i += lanes) {
      float z = Ut[j * rows + i];
      for (long k = 0; k < j; ++k) {
        z -= held[k] * Ut[k * rows + i];
      }
      Ut[j * rows + i] = z;
      norm += z * z;
    }
    norm = precise::sqrt(threadgroup_sum(norm, scratch + 64, lane, lanes));
    for (long i = lane; i < rows; i += lanes) {
      Ut[j * rows + i] /= norm;
    }
  }
}

#define INSTANTIATE(N) \
  template             \
      [[host_name("svd_simdgroup_" #N)]] [[kernel]] decltype(svd_simdgroup<N>) svd_simdgroup<N>;

#define INSTANTIATE_FLOAT(function) \
  template [[host_name(#function "_float")]] [[kernel]] decltype(function<float>) function<float>;

INSTANTIATE_FLOAT(svd_begin)
INSTANTIATE_FLOAT(svd_pair)
INSTANTIATE_FLOAT(svd_complete)
INSTANTIATE(8)
INSTANTIATE(16)
INSTANTIATE(32)
