// SPDX-License-Identifier: MIT
// R = W diag(S) Z^T, as in svd.metal, for any number of rows: those of X = [R | W^T] stand in
// blocks of half a pair. In each round of a tournament every block meets another: a product gives
// the Gram matrix of each pair, svd_pair finds the rotations that make it more diagonal, another
// product applies them, and svd_move brings the next pairs together. In the end svd_norms and
// svd_order find S, svd_vectors W^T, and svd_complete Z^T.
//
// Matrices X are [rows, length]: n rows of R and others that pad it, of n values and, where vectors
// are wanted, those of the identity [rows, rows].

#include "row_jacobi.h"

// X = [R | I], scaled by a power of two; found = 0, or what info is. One threadgroup per matrix.
[[max_total_threads_per_threadgroup(64)]] kernel void svd_begin(
    device const float* R [[buffer(0)]],
    device float* X [[buffer(1)]],
    device float* powers [[buffer(2)]],
    device float* levels [[buffer(3)]],
    device int* found [[buffer(4)]],
    constant uint& n [[buffer(5)]],
    constant uint& rows [[buffer(6)]],
    constant uint& length [[buffer(7)]],
    uint matrix [[threadgroup_position_in_grid]],
    uint lane [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  threadgroup float scratch[64];
  R += ulong(matrix) * (n * n);
  X += ulong(matrix) * (rows * length);
  float largest = 0.0f;
  for (uint i = lane; i < n * n; i += lanes) {
    const float x = abs(R[i]);
    largest = x < INFINITY ? max(largest, x) : INFINITY;
  }
  largest = threadgroup_max(largest, scratch, lane, lanes);
  const bool finite = largest < INFINITY;
  const float power = finite ? power_of_two(largest) : 1.0f;
  float sum = 0.0f;
  for (uint j = 0; j < rows; ++j) {
    for (uint i = lane; i < length; i += lanes) {
      float x = 0.0f;
      if (i >= n) {
        x = i - n == j ? 1.0f : 0.0f;
      } else if (finite && j < n) {
        x = R[j * n + i] / power;
        sum += x * x;
      }
      X[j * length + i] = x;
    }
  }
  sum = threadgroup_sum(sum, scratch + 32, lane, lanes);
  if (lane == 0) {
    powers[matrix] = power;
    levels[matrix] = kNothing * precise::sqrt(sum / float(n));
    found[matrix] = finite ? 0 : kNotFinite;
  }
}

// turns = rotations that make the Gram matrices [size, size] of pairs of blocks more diagonal, as
// rows of new columns; worst = the largest cosine that each began with. One threadgroup per pair,
// of up to PAIR rows.
template <int PAIR>
[[max_total_threads_per_threadgroup(64)]] kernel void svd_pair(
    device const float* gram [[buffer(0)]],
    device float* turns [[buffer(1)]],
    device float* worst [[buffer(2)]],
    device const float* levels [[buffer(3)]],
    constant uint& pairs [[buffer(4)]],
    constant uint& n [[buffer(5)]],
    constant uint& sweeps [[buffer(6)]],
    constant float& tolerance [[buffer(7)]],
    uint pair [[threadgroup_position_in_grid]],
    uint lane [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  threadgroup float G[PAIR * PAIR];
  threadgroup float W[PAIR * PAIR];
  threadgroup float sines[PAIR / 2];
  threadgroup float halves[PAIR / 2];
  threadgroup uint swaps[PAIR / 2];
  threadgroup float scratch[32];
  const float level = levels[pair / pairs];
  gram += ulong(pair) * (n * n);
  turns += ulong(pair) * (n * n);
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

  const uint rounds = largest > tolerance ? sweeps * (n - 1) : 0;
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

// Where `block` stands in `round` of the tournament: pairs follow each other, and of a pair the
// block that is first in the order of all, so that long rows gather there.
inline uint place_of(uint block, uint round, uint blocks) {
  const uint last = blocks - 1;
  const uint away = (block + last - round) % last;
  const uint k = block == last ? 0 : min(away, last - away);
  return 2 * k + (round_robin_pair(k, round, blocks).x == block ? 0 : 1);
}

// X = the blocks of Y, of `height` rows each, from their places in `round` to those in the next
// one. One thread per value.
[[max_total_threads_per_threadgroup(64)]] kernel void svd_move(
    device const float* Y [[buffer(0)]],
    device float* X [[buffer(1)]],
    constant uint& blocks [[buffer(2)]],
    constant uint& height [[buffer(3)]],
    constant uint& length [[buffer(4)]],
    constant uint& round [[buffer(5)]],
    uint3 position [[thread_position_in_grid]]) {
  const uint i = position.x;
  if (i >= length) {
    return;
  }
  const uint to = position.y / height;
  const uint2 pair = round_robin_pair(to / 2, (round + 1) % (blocks - 1), blocks);
  const uint from = place_of(to % 2 == 0 ? pair.x : pair.y, round, blocks);
  const ulong matrix = ulong(position.z) * (blocks * height * length);
  const uint row = from * height + position.y % height;
  X[matrix + position.y * length + i] = Y[matrix + row * length + i];
}

// The norm of each row of X, and -1 for rows that pad it: they come after rows of R that are zero.
// One simdgroup per row.
[[max_total_threads_per_threadgroup(32)]] kernel void svd_norms(
    device const float* X [[buffer(0)]],
    device float* norms [[buffer(1)]],
    constant uint& n [[buffer(2)]],
    constant uint& length [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_position_in_threadgroup]]) {
  X += ulong(row) * length;
  float sum = 0.0f;
  for (uint i = lane; i < n; i += 32) {
    sum += X[i] * X[i];
  }
  sum = simd_sum(sum);
  float beyond = 0.0f;
  for (uint i = 2 * n + lane; i < length; i += 32) {
    beyond += abs(X[i]);
  }
  beyond = simd_sum(beyond);
  if (lane == 0) {
    norms[row] = beyond > 0.5f ? -1.0f : precise::sqrt(sum);
  }
}

// The norms in descending order, where each was, and info. worst is [rounds, matrices, pairs], of
// the last sweep. One threadgroup per matrix.
[[max_total_threads_per_threadgroup(64)]] kernel void svd_order(
    device const float* norms [[buffer(0)]],
    device const float* powers [[buffer(1)]],
    device const float* worst [[buffer(2)]],
    device const int* found [[buffer(3)]],
    device float* S [[buffer(4)]],
    device int* order [[buffer(5)]],
    device int* info [[buffer(6)]],
    constant uint& n [[buffer(7)]],
    constant uint& rows [[buffer(8)]],
    constant uint& rounds [[buffer(9)]],
    constant uint& pairs [[buffer(10)]],
    constant float& limit [[buffer(11)]],
    uint matrix [[threadgroup_position_in_grid]],
    uint matrices [[threadgroups_per_grid]],
    uint lane [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  threadgroup float scratch[32];
  const bool finite = found[matrix] == 0;
  norms += ulong(matrix) * rows;
  S += ulong(matrix) * n;
  order += ulong(matrix) * n;
  for (uint i = lane; i < rows; i += lanes) {
    const float norm = norms[i];
    uint place = 0;
    for (uint j = 0; j < rows; ++j) {
      place += norms[j] > norm || (norms[j] == norm && j < i) ? 1 : 0;
    }
    if (place < n) {
      S[place] = finite ? norm * powers[matrix] : NAN;
      order[place] = int(i);
    }
  }
  float largest = 0.0f;
  for (uint i = lane; i < rounds * pairs; i += lanes) {
    largest = max(largest, worst[(i / pairs * matrices + matrix) * pairs + i % pairs]);
  }
  largest = threadgroup_max(largest, scratch, lane, lanes);
  if (lane == 0) {
    info[matrix] = finite ? (largest > limit ? 1 : 0) : found[matrix];
  }
}

// W^T [n, n], the rows of the right part of X in order. One thread per value.
[[max_total_threads_per_threadgroup(64)]] kernel void svd_vectors(
    device const float* X [[buffer(0)]],
    device const int* order [[buffer(1)]],
    device const int* found [[buffer(2)]],
    device float* Wt [[buffer(3)]],
    constant uint& n [[buffer(4)]],
    constant uint& rows [[buffer(5)]],
    constant uint& length [[buffer(6)]],
    uint3 position [[thread_position_in_grid]]) {
  const uint i = position.x;
  if (i >= n) {
    return;
  }
  const ulong at = ulong(position.z) * n + position.y;
  const ulong from = (ulong(position.z) * rows + order[at]) * length + n;
  Wt[at * n + i] = found[position.z] == 0 ? X[from + i] : NAN;
}

// Z^T [n, n]: rows of X in order, of length 1, as long as their norms are more than nothing. Each
// after them is the unit vector that the rows before leave most of, less what they hold of it,
// twice. `held` is scratch for n values. One threadgroup per matrix.
[[max_total_threads_per_threadgroup(64)]] kernel void svd_complete(
    device const float* X [[buffer(0)]],
    device const float* norms [[buffer(1)]],
    device const int* order [[buffer(2)]],
    device const float* levels [[buffer(3)]],
    device const int* found [[buffer(4)]],
    device float* Zt [[buffer(5)]],
    device float* held [[buffer(6)]],
    constant uint& n [[buffer(7)]],
    constant uint& rows [[buffer(8)]],
    constant uint& length [[buffer(9)]],
    uint matrix [[threadgroup_position_in_grid]],
    uint lane [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  threadgroup float scratch[96];
  X += ulong(matrix) * (rows * length);
  norms += ulong(matrix) * rows;
  order += ulong(matrix) * n;
  Zt += ulong(matrix) * (n * n);
  held += ulong(matrix) * n;
  const bool finite = found[matrix] == 0;
  uint done = finite ? 0 : n;
  while (done < n && norms[order[done]] > levels[matrix]) {
    ++done;
  }
  for (uint k = 0; k < done; ++k) {
    const uint row = order[k];
    for (uint i = lane; i < n; i += lanes) {
      Zt[k * n + i] = finite ? X[row * length + i] / norms[row] : NAN;
    }
  }
  for (uint j = done; j < n; ++j) {
    // the rows before are there
    threadgroup_barrier(mem_flags::mem_device);
    float most = -INFINITY;
    float best = 0.0f;
    for (uint i = lane; i < n; i += lanes) {
      float left = 1.0f;
      for (uint k = 0; k < j; ++k) {
        left -= Zt[k * n + i] * Zt[k * n + i];
      }
      best = left > most ? float(i) : best;
      most = max(most, left);
    }
    const float winner = threadgroup_max(most, scratch, lane, lanes);
    const uint row = uint(threadgroup_max(most == winner ? best : 0.0f, scratch + 32, lane, lanes));
    for (uint i = lane; i < n; i += lanes) {
      float z = i == row ? 1.0f : 0.0f;
      for (uint k = 0; k < j; ++k) {
        z -= Zt[k * n + row] * Zt[k * n + i];
      }
      Zt[j * n + i] = z;
    }
    // the new row is read whole
    threadgroup_barrier(mem_flags::mem_device);
    for (uint k = lane / 32; k < j; k += lanes / 32) {
      float dot = 0.0f;
      for (uint i = lane % 32; i < n; i += 32) {
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
    for (uint i = lane; i < n; i += lanes) {
      float z = Zt[j * n + i];
      for (uint k = 0; k < j; ++k) {
        z -= held[k] * Zt[k * n + i];
      }
      Zt[j * n + i] = z;
      norm += z * z;
    }
    norm = precise::sqrt(threadgroup_sum(norm, scratch + 64, lane, lanes));
    for (uint i = lane; i < n; i += lanes) {
      Zt[j * n + i] /= norm;
    }
  }
}
