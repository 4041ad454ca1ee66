// SPDX-License-Identifier: MIT
// householder_vector: v_0 = 1 and tau with (I - tau v v^T) x = beta e_0. One simdgroup per vector.
// apply_householder_left: A - tau v (v^T A), one thread per column.
// apply_householder_right: A - tau (A v) v^T, one simdgroup per row.

#include "householder.h"

template <typename T>
[[max_total_threads_per_threadgroup(256)]] kernel void householder_vector(
    device const T* x [[buffer(0)]],
    device T* v [[buffer(1)]],
    device T* tau [[buffer(2)]],
    constant uint& vectors [[buffer(3)]],
    constant uint& n [[buffer(4)]],
    uint thread_index [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  const uint row = thread_index / 32;
  if (row >= vectors) {
    return;
  }
  x += ulong(row) * n;
  v += ulong(row) * n;
  float largest = 0.0f;
  for (uint i = lane; i < n; i += 32) {
    largest = max(largest, abs(float(x[i])));
  }
  const float scale = power_of_two_for(simd_max(largest));
  float tail = 0.0f;
  for (uint i = lane; i < n; i += 32) {
    const float scaled = float(x[i]) * scale;
    tail += i > 0 ? scaled * scaled : 0.0f;
  }
  const Reflector h = reflector_from(float(x[0]) * scale, simd_sum(tail));
  for (uint i = lane; i < n; i += 32) {
    v[i] = i == 0 ? T(1.0f) : T(float(x[i]) * scale * h.inverse);
  }
  if (lane == 0) {
    tau[row] = T(h.tau);
  }
}

template <typename T>
[[max_total_threads_per_threadgroup(256)]] kernel void apply_householder_left(
    device const T* A [[buffer(0)]],
    device const T* v [[buffer(1)]],
    device const T* tau [[buffer(2)]],
    device T* Y [[buffer(3)]],
    constant uint& m [[buffer(4)]],
    constant uint& n [[buffer(5)]],
    uint2 position [[thread_position_in_grid]]) {
  const uint matrix = position.y;
  if (position.x >= n) {
    return;
  }
  const ulong first = ulong(matrix) * (m * n) + position.x;
  A += first;
  Y += first;
  v += ulong(matrix) * m;
  float dot = 0.0f;
  for (uint i = 0; i < m; ++i) {
    dot += float(v[i]) * float(A[i * n]);
  }
  dot *= float(tau[matrix]);
  for (uint i = 0; i < m; ++i) {
    Y[i * n] = T(float(A[i * n]) - dot * float(v[i]));
  }
}

template <typename T>
[[max_total_threads_per_threadgroup(256)]] kernel void apply_householder_right(
    device const T* A [[buffer(0)]],
    device const T* v [[buffer(1)]],
    device const T* tau [[buffer(2)]],
    device T* Y [[buffer(3)]],
    constant uint& rows [[buffer(4)]],
    constant uint& m [[buffer(5)]],
    constant uint& n [[buffer(6)]],
    uint thread_index [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  const uint row = thread_index / 32;
  if (row >= rows) {
    return;
  }
  const uint matrix = row / m;
  A += ulong(row) * n;
  Y += ulong(row) * n;
  v += ulong(matrix) * n;
  float dot = 0.0f;
  for (uint j = lane; j < n; j += 32) {
    dot += float(v[j]) * float(A[j]);
  }
  dot = simd_sum(dot) * float(tau[matrix]);
  for (uint j = lane; j < n; j += 32) {
    Y[j] = T(float(A[j]) - dot * float(v[j]));
  }
}
