// SPDX-License-Identifier: MIT
// A = U diag(S) V^T by one-sided Jacobi on the triangle of a QR factorization: A = Q R for tall A,
// rotations make the rows of R orthogonal, W^T R = diag(S) Z^T, and A = (Q W) diag(S) Z^T. The rows
// of R are closer to that than the columns of A, by far where A is ill-conditioned. Matrices are
// scaled by a power of two, so that squares neither overflow nor matter where they underflow. Rows
// that end up as nothing are replaced by any that complete Z.
//
// svd_simdgroup: up to N x N, N = 8, 16 or 32. A lane per row of R, 32 / N matrices per simdgroup.
// svd_threadgroup: R of up to 64 rows in threadgroup memory, a simdgroup per pair of rows.
// Larger: svd_blocks.metal.

#include "column_jacobi.h"
#include "householder.h"
#include "row_jacobi.h"

// Matrices are rows x columns; the tall one of U and V has tall_columns. They pass through `stage`,
// so that memory is read and written in order. Without VECTORS there are no U and V.
template <int N, int SIMDGROUPS, bool VECTORS>
[[max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] kernel void svd_simdgroup(
    device const float* A [[buffer(0)]],
    device float* U [[buffer(1)]],
    device float* S [[buffer(2)]],
    device float* V [[buffer(3)]],
    device int* info [[buffer(4)]],
    constant uint& batch [[buffer(5)]],
    constant uint& rows [[buffer(6)]],
    constant uint& columns [[buffer(7)]],
    constant uint& tall_columns [[buffer(8)]],
    constant uint& sweeps [[buffer(9)]],
    constant float& tolerance [[buffer(10)]],
    uint thread_index [[thread_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simd_lane [[thread_index_in_simdgroup]]) {
  constexpr int PER = 32 / N;
  threadgroup float stages[SIMDGROUPS * 32 * N];
  threadgroup float* stage = stages + simdgroup * 32 * N;
  const uint first = thread_index / 32 * PER;
  const uint count = min(batch - min(batch, first), uint(PER));
  const uint size = rows * columns;
  const bool wide = rows < columns;
  const uint M = max(rows, columns);
  const uint K = min(rows, columns);
  const uint lane = simd_lane % N;
  const uint base = simd_lane - lane;
  const uint mine = simd_lane / N;

  A += ulong(first) * size;
  for (uint i = simd_lane; i < count * size; i += 32) {
    stage[i] = A[i];
  }
  // stage is read by other lanes
  simdgroup_barrier(mem_flags::mem_threadgroup);
  float x[N];
  float largest = 0.0f;
  float zero = 0.0f;
#pragma unroll
  for (uint i = 0; i < N; ++i) {
    const bool inside = mine < count && lane < K && i < M;
    const uint at = mine * size + (wide ? lane * columns + i : i * columns + lane);
    const float value = stage[inside ? at : 0];
    x[i] = inside ? value : 0.0f;
    largest = max(largest, abs(x[i]));
    zero += x[i] * 0.0f;
  }
  const bool finite = lanes_sum<N>(zero) == 0.0f;
  const float scale = power_of_two_for(largest);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    x[i] = finite ? x[i] * scale : 0.0f;
  }
  // A has been read: R and the reflectors take its place
  simdgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup float* factors = stage + mine * N * N;
  const float power = power_of_two(lanes_max<N>(largest));
  // infinite where R is too small beside the largest column
  const float to_power = scale * power;
  const float tau = factor_columns<N>(x, int(K), int(lane), ushort(base), to_power, factors);

  // reflectors and rows are read by other lanes
  simdgroup_barrier(mem_flags::mem_threadgroup);
  // a column of Q, to become one of Q W
  float v[N];
#pragma unroll
  for (uint i = 0; i < N; ++i) {
    v[i] = i == lane ? 1.0f : 0.0f;
  }
  if (VECTORS) {
    apply_q<N>(v, factors, tau, int(K), ushort(base));
  }
#pragma unroll
  for (uint i = 0; i < N; ++i) {
    const float r = factors[lane * N + i];
    x[i] = i >= lane ? r : 0.0f;
  }

  float worst = 1.0f;
  for (uint k = 0; k < sweeps && simd_any(worst > 0.0f); ++k) {
    worst = sweep<N, VECTORS>(x, v, lane, tolerance);
  }

  const float norm = precise::sqrt(squared_norm<N>(x));
  const float key = lane < K ? norm : -1.0f;
  uint place = 0;
#pragma unroll
  for (ushort mask = 1; mask < N; ++mask) {
    const float other = simd_shuffle_xor(key, mask);
    place += other > key || (other == key && (lane ^ mask) < lane) ? 1 : 0;
  }
  const float nan = as_type<float>(0x7fc00000u);
  if (mine < count && lane < K) {
    S[ulong(first + mine) * K + place] = finite ? norm * power : nan;
  }
  const bool failed = lanes_max<N>(worst) > 64.0f * tolerance;
  if (mine < count && lane == 0) {
    info[first + mine] = finite ? (failed ? 1 : 0) : kNotFinite;
  }
  if (!VECTORS) {
    return;
  }

  const uint tall_size = M * tall_columns;
  // every row of R has been read
  simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (uint i = 0; i < N; ++i) {
    if (mine < count && lane < tall_columns && i < M) {
      stage[mine * tall_size + i * tall_columns + place] = finite ? v[i] : nan;
    }
  }
  // stage is read by other lanes
  simdgroup_barrier(mem_flags::mem_threadgroup);
  device float* tall = (wide ? V : U) + ulong(first) * tall_size;
  for (uint i = simd_lane; i < count * tall_size; i += 32) {
    tall[i] = stage[i];
  }
  // every lane has read stage
  simdgroup_barrier(mem_flags::mem_threadgroup);
  const bool there = norm > kNothing * lanes_max<N>(norm);
  const float inverse = there ? 1.0f / norm : 0.0f;
  const bool inside = mine < count && lane < K;
#pragma unroll
  for (uint i = 0; i < N; ++i) {
    if (inside && i < K) {
      stage[(mine * K + i) * K + place] = x[i] * inverse;
    }
  }
  // each lane has a row now
  simdgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup float* row = stage + (mine * K + lane) * K;
  const uint known = uint(lanes_sum<N>(there ? 1.0f : 0.0f));
  complete_columns<N>(row, inside, lane, K, inside ? known : K);
  for (uint i = 0; inside && !finite && i < K; ++i) {
    row[i] = nan;
  }
  // stage is read by other lanes
  simdgroup_barrier(mem_flags::mem_threadgroup);
  device float* square = (wide ? U : V) + ulong(first) * (K * K);
  for (uint i = simd_lane; i < count * K * K; i += 32) {
    square[i] = stage[i];
  }
}

// R = U diag(S) V^T, n x n, 33 to 64 rows. X and W fill the memory of the threadgroup: what else
// its simdgroups, up to 16, tell each other goes through S.
template <bool VECTORS>
[[max_total_threads_per_threadgroup(512)]] kernel void svd_threadgroup(
    device const float* R [[buffer(0)]],
    device float* U [[buffer(1)]],
    device float* S [[buffer(2)]],
    device float* V [[buffer(3)]],
    device int* info [[buffer(4)]],
    constant uint& n [[buffer(5)]],
    constant uint& sweeps [[buffer(6)]],
    constant float& tolerance [[buffer(7)]],
    uint matrix [[threadgroup_position_in_grid]],
    uint thread_index [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float X[4096];
  threadgroup float W[4096];
  const uint players = n + n % 2;
  R += ulong(matrix) * (n * n);
  S += ulong(matrix) * n;
  float largest = 0.0f;
  for (uint i = thread_index; i < 4096; i += threads) {
    const bool inside = i / 64 < n && i % 64 < n;
    X[i] = inside ? R[i / 64 * n + i % 64] : 0.0f;
    largest = abs(X[i]) < INFINITY ? max(largest, abs(X[i])) : INFINITY;
  }
  largest = threadgroup_max(largest, W, thread_index, threads);
  const bool finite = largest < INFINITY;
  const float power = finite ? power_of_two(largest) : 1.0f;
  float sum = 0.0f;
  for (uint i = thread_index; i < 4096; i += threads) {
    X[i] = finite ? X[i] / power : 0.0f;
    sum += X[i] * X[i];
  }
  sum = threadgroup_sum(sum, W + 32, thread_index, threads);
  const float level = kNothing * precise::sqrt(sum / float(n));
  // the scratch in W has been read
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_index; i < 4096; i += threads) {
    W[i] = i / 64 == i % 64 ? 1.0f : 0.0f;
  }

  float worst = 1.0f;
  for (uint sweep = 0; sweep < sweeps && worst > 0.0f; ++sweep) {
    float own = 0.0f;
    for (uint round = 0; round < players - 1; ++round) {
      // the rows are as the last round left them
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint k = simdgroup; k < players / 2; k += simdgroups) {
        const uint2 pair = round_robin_pair(k, round, players);
        own = max(own, rotate_rows<VECTORS>(X, W, pair, lane, level, tolerance));
      }
    }
    // in turns of two: the barrier of the next sweep guards this half
    device float* angles = S + sweep % 2 * 16;
    if (lane == 0) {
      angles[simdgroup] = own;
    }
    // every simdgroup's angle is there
    threadgroup_barrier(mem_flags::mem_device);
    worst = simd_max(lane < simdgroups ? angles[lane] : 0.0f);
  }

  // no one needs the angles any more, and every row is complete
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  for (uint k = simdgroup; k < n; k += simdgroups) {
    threadgroup float* x = X + k * 64 + lane;
    const float norm = precise::sqrt(simd_sum(x[0] * x[0] + x[32] * x[32]));
    x[0] = norm > level ? x[0] / norm : 0.0f;
    x[32] = norm > level ? x[32] / norm : 0.0f;
    if (lane == 0) {
      S[k] = norm;
    }
  }
  // every norm is there, and every row of length 1
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  // in registers: lanes have two norms each
  const float2 norms = float2(S[lane], lane + 32 < n ? S[lane + 32] : -1.0f);
  const uint row = thread_index % 64;
  const float norm = row < 32 ? norms.x : norms.y;
  uint place = 0;
  for (uint k = 0; k < n; ++k) {
    const float other = simd_shuffle(k < 32 ? norms.x : norms.y, k % 32);
    place += other > norm || (other == norm && k < row) ? 1 : 0;
  }
  if (VECTORS && simdgroup == 0) {
    complete_rows(X, norms, n, lane, level);
  }
  // every row is complete, and the order of S is known
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  const float nan = as_type<float>(0x7fc00000u);
  if (thread_index < n) {
    S[place] = finite ? norm * power : nan;
  }
  if (thread_index == 0) {
    info[matrix] = finite ? (worst > 64.0f * tolerance ? 1 : 0) : kNotFinite;
  }
  U += ulong(matrix) * (n * n);
  V += ulong(matrix) * (n * n);
  for (uint i = thread_index / 64; VECTORS && row < n && i < n; i += threads / 64) {
    U[i * n + place] = finite ? W[row * 64 + i] : nan;
    V[i * n + place] = finite ? X[row * 64 + i] : nan;
  }
}

// Y = diag(1 / S) C, with 0 for the values of S up to rcond times the first, and in `rank` the
// number of the others. One thread per value of C [K, columns].
[[max_total_threads_per_threadgroup(64)]] kernel void svd_divide(
    device const float* C [[buffer(0)]],
    device const float* S [[buffer(1)]],
    device const float* rcond [[buffer(2)]],
    device float* Y [[buffer(3)]],
    device long* rank [[buffer(4)]],
    constant uint& K [[buffer(5)]],
    constant uint& columns [[buffer(6)]],
    uint2 position [[thread_position_in_grid]]) {
  const uint i = position.x;
  const ulong first = ulong(position.y) * (K * columns);
  S += ulong(position.y) * K;
  const float limit = rcond[position.y] * S[0];
  if (i < K * columns) {
    const float value = S[i / columns];
    Y[first + i] = (limit >= value ? 0.0f : 1.0f / value) * C[first + i];
  }
  if (i == 0) {
    uint count = 0;
    for (uint k = 0; k < K; ++k) {
      count += limit < S[k] ? 1 : 0;
    }
    rank[position.y] = count;
  }
}
