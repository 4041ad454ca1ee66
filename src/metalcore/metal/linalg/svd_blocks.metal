// SPDX-License-Identifier: MIT
// R = W diag(S) Z^T, as in svd.metal, for any number of rows: those of [R | W^T] stand in blocks of
// half a pair, which svd_begin scales; torch multiplies the Gram matrix of each pair of blocks,
// svd_pair finds the rotations that make it more diagonal, and torch applies them; svd_complete
// fills in columns of Z.

#include "row_jacobi.h"

// Scales the first `length` values of the `rows` rows of each X, `stride` apart. One threadgroup
// per matrix.
template <typename T>
kernel void svd_begin(
    device float* X [[buffer(0)]],
    device float* powers [[buffer(1)]],
    device float* levels [[buffer(2)]],
    device int* info [[buffer(3)]],
    constant long& rows [[buffer(4)]],
    constant long& length [[buffer(5)]],
    constant long& stride [[buffer(6)]],
    uint matrix [[threadgroup_position_in_grid]],
    uint lane [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  threadgroup float scratch[64];
  X += matrix * rows * stride;
  float largest = 0.0f;
  for (long j = 0; j < rows; ++j) {
    for (long i = lane; i < length; i += lanes) {
      const float x = abs(X[j * stride + i]);
      largest = x < INFINITY ? max(largest, x) : INFINITY;
    }
  }
  largest = threadgroup_max(largest, scratch, lane, lanes);
  const bool finite = largest < INFINITY;
  const float power = finite ? power_of_two(largest) : 1.0f;
  float sum = 0.0f;
  for (long j = 0; j < rows; ++j) {
    for (long i = lane; i < length; i += lanes) {
      const float x = finite ? X[j * stride + i] / power : 0.0f;
      X[j * stride + i] = x;
      sum += x * x;
    }
  }
  sum = threadgroup_sum(sum, scratch + 32, lane, lanes);
  if (lane == 0) {
    powers[matrix] = power;
    levels[matrix] = kNothing * precise::sqrt(sum / float(length));
    info[matrix] = finite ? 0 : kNotFinite;
  }
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
  threadgroup float sines[24];
  threadgroup float halves[24];
  threadgroup uint swaps[24];
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
      rotation r = {1.0f, 0.0f, 0.0f, 0.0f};
      if (cosine(pp, qq, pq, level) > tolerance) {
        r = jacobi_rotation(pp, qq, pq);
      }
      sines[k] = r.s;
      halves[k] = r.h;
      // the longer row comes first
      swaps[k] = pp < qq ? 1 : 0;
    }
    // every rotation of the round is known, and G no longer read for them
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint b = lane; b < n / 2 * (n / 2); b += lanes) {
      const uint k = b / (n / 2);
      const uint l = b % (n / 2);
      const uint2 row = round_robin_pair(k, round % (n - 1), n) * n;
      const uint2 column = round_robin_pair(l, round % (n - 1), n);
      float pu = G[row.x + column.x];
      float pw = G[row.x + column.y];
      float qu = G[row.y + column.x];
      float qw = G[row.y + column.y];
      rotate(sines[k], halves[k], &pu, &qu);
      rotate(sines[k], halves[k], &pw, &qw);
      rotate(sines[l], halves[l], &pu, &pw);
      rotate(sines[l], halves[l], &qu, &qw);
      const uint2 to = swaps[k] ? row.yx : row;
      const uint2 at = swaps[l] ? column.yx : column;
      G[to.x + at.x] = pu;
      G[to.x + at.y] = pw;
      G[to.y + at.x] = qu;
      G[to.y + at.y] = qw;
    }
    for (uint i = lane; i < n / 2 * n; i += lanes) {
      const uint k = i / n;
      const uint2 row = round_robin_pair(k, round % (n - 1), n) * n + i % n;
      float p = W[row.x];
      float q = W[row.y];
      rotate(sines[k], halves[k], &p, &q);
      W[row.x] = swaps[k] ? q : p;
      W[row.y] = swaps[k] ? p : q;
    }
    // the next round reads other pairs of G, and the last one all of W
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (uint i = lane; i < n * n; i += lanes) {
    turns[i] = W[i];
  }
}

// The rows of Z^T [n, n] after the first ones whose norms are more than nothing: the unit vector
// that the rows before leave most of, less what they hold of it, twice. `held` is scratch for n
// values. One threadgroup per matrix.
template <typename T>
kernel void svd_complete(
    device float* Zt [[buffer(0)]],
    device const float* norms [[buffer(1)]],
    device const float* levels [[buffer(2)]],
    device float* held [[buffer(3)]],
    constant long& n [[buffer(4)]],
    uint matrix [[threadgroup_position_in_grid]],
    uint lane [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  threadgroup float scratch[96];
  Zt += matrix * n * n;
  norms += matrix * n;
  held += matrix * n;
  long done = 0;
  while (done < n && norms[done] > levels[matrix]) {
    ++done;
  }
  for (long j = done; j < n; ++j) {
    float most = -INFINITY;
    float best = 0.0f;
    for (long i = lane; i < n; i += lanes) {
      float left = 1.0f;
      for (long k = 0; k < j; ++k) {
        left -= Zt[k * n + i] * Zt[k * n + i];
      }
      best = left > most ? float(i) : best;
      most = max(most, left);
    }
    const float winner = threadgroup_max(most, scratch, lane, lanes);
    const long row = long(threadgroup_max(most == winner ? best : 0.0f, scratch + 32, lane, lanes));
    for (long i = lane; i < n; i += lanes) {
      float z = i == row ? 1.0f : 0.0f;
      for (long k = 0; k < j; ++k) {
        z -= Zt[k * n + row] * Zt[k * n + i];
      }
      Zt[j * n + i] = z;
    }
    // the new row is read whole
    threadgroup_barrier(mem_flags::mem_device);
    for (long k = lane / 32; k < j; k += lanes / 32) {
      float dot = 0.0f;
      for (long i = lane % 32; i < n; i += 32) {
        dot += Zt[k * n + i] * Zt[j * n + i];
      }
      dot = simd_sum(dot);
      if (lane % 32 == 0) {
        held[k] = dot;
      }
    }
    // every thread needs all of held
    threadgroup_barrier(mem_flags::mem_device);
    float norm = 0.0f;
    for (long i = lane; i < n; i += lanes) {
      float z = Zt[j * n + i];
      for (long k = 0; k < j; ++k) {
        z -= held[k] * Zt[k * n + i];
      }
      Zt[j * n + i] = z;
      norm += z * z;
    }
    norm = precise::sqrt(threadgroup_sum(norm, scratch + 64, lane, lanes));
    for (long i = lane; i < n; i += lanes) {
      Zt[j * n + i] /= norm;
    }
  }
}

#define INSTANTIATE(function) \
  template [[host_name(#function "_float")]] [[kernel]] decltype(function<float>) function<float>;

INSTANTIATE(svd_begin)
INSTANTIATE(svd_pair)
INSTANTIATE(svd_complete)
