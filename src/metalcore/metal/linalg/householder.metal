// SPDX-License-Identifier: MIT
// householder_vector: v_0 = 1 and tau with (I - tau v v^T) x = beta e_0. One simdgroup per vector.
// apply_householder_left: A - tau v (v^T A), one thread per column.
// apply_householder_right: A - tau (A v) v^T, one simdgroup per row.

#include "householder.h"

template <typename T>
kernel void householder_vector(
    device const T* x [[buffer(0)]],
    device T* v [[buffer(1)]],
    device T* tau [[buffer(2)]],
    constant long& vectors [[buffer(3)]],
    constant long& n [[buffer(4)]],
    uint thread_index [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  const long row = thread_index / 32;
  if (row >= vectors) {
    return;
  }
  x += row * n;
  v += row * n;
  float largest = 0.0f;
  for (long i = lane; i < n; i += 32) {
    largest = max(largest, abs(float(x[i])));
  }
  const float scale = power_of_two_for(simd_max(largest));
  float tail = 0.0f;
  for (long i = lane; i < n; i += 32) {
    const float scaled = float(x[i]) * scale;
    tail += i > 0 ? scaled * scaled : 0.0f;
  }
  const Reflector h = reflector_from(float(x[0]) * scale, simd_sum(tail));
  for (long i = lane; i < n; i += 32) {
    v[i] = i == 0 ? T(1.0f) : T(float(x[i]) * scale * h.inverse);
  }
  if (lane == 0) {
    tau[row] = T(h.tau);
  }
}

template <typename T>
kernel void apply_householder_left(
    device const T* A [[buffer(0)]],
    device const T* v [[buffer(1)]],
    device const T* tau [[buffer(2)]],
    device T* Y [[buffer(3)]],
    constant long& m [[buffer(4)]],
    constant long& n [[buffer(5)]],
    uint2 position [[thread_position_in_grid]]) {
  const long matrix = position.y;
  const long first = matrix * m * n + position.x;
  if (position.x >= n) {
    return;
  }
  float dot = 0.0f;
  for (long i = 0; i < m; ++i) {
    dot += float(v[matrix * m + i]) * float(A[first + i * n]);
  }
  dot *= float(tau[matrix]);
  for (long i = 0; i < m; ++i) {
    Y[first + i * n] = T(float(A[first + i * n]) - dot * float(v[matrix * m + i]));
  }
}

template <typename T>
kernel void apply_householder_right(
    device const T* A [[buffer(0)]],
    device const T* v [[buffer(1)]],
    device const T* tau [[buffer(2)]],
    device T* Y [[buffer(3)]],
    constant long& rows [[buffer(4)]],
    constant long& m [[buffer(5)]],
    constant long& n [[buffer(6)]],
    uint thread_index [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  const long row = thread_index / 32;
  if (row >= rows) {
    return;
  }
  const long matrix = row / m;
  float dot = 0.0f;
  for (long j = lane; j < n; j += 32) {
    dot += float(v[matrix * n + j]) * float(A[row * n + j]);
  }
  dot = simd_sum(dot) * float(tau[matrix]);
  for (long j = lane; j < n; j += 32) {
    Y[row * n + j] = T(float(A[row * n + j]) - dot * float(v[matrix * n + j]));
  }
}
