// SPDX-License-Identifier: MIT
// m' = max(lf + m, i), C' = a C + b k v^T, n' = a n + b k, h = s q C' / (max(|s q n'|, e^-m') +
// eps), with a = exp(lf + m - m'), b = exp(i - m'); with sigmoid gates log sigmoid(i) for i, and m'
// = 0.
//
// One threadgroup per 32 columns of a head's state, a lane per column; simdgroups take rows in
// turn, so the state is read and written once.

#include "gates.h"

template <typename T, typename G, int SIMDGROUPS, bool SIGMOID, bool NORMALIZE>
[[max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] kernel void mlstm_step(
    device const T* q [[buffer(0)]],
    device const T* k [[buffer(1)]],
    device const T* v [[buffer(2)]],
    device const G* i [[buffer(3)]],
    device const G* f [[buffer(4)]],
    device const float* c [[buffer(5)]],
    device const float* n [[buffer(6)]],
    device const float* m [[buffer(7)]],
    device T* h [[buffer(8)]],
    device float* c_next [[buffer(9)]],
    device float* n_next [[buffer(10)]],
    device float* m_next [[buffer(11)]],
    constant uint& size [[buffer(12)]],
    constant uint& columns [[buffer(13)]],
    constant float& eps [[buffer(14)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float sums[SIMDGROUPS * 32];
  threadgroup float products[SIMDGROUPS];
  const ulong head = group.z;
  const uint column = group.x * 32 + lane;
  const bool is_column = column < columns;
  const float kept = log_sigmoid(float(f[head])) + m[head];
  const float written = SIGMOID ? log_sigmoid(float(i[head])) : float(i[head]);
  const float now = SIGMOID ? 0.0f : max(kept, written);
  const float keep = precise::exp(kept - now);
  const float add = precise::exp(written - now);
  const float root = precise::rsqrt(float(size));
  q += head * size;
  k += head * size;
  n += head * size;
  n_next += head * size;
  c += head * size * columns;
  c_next += head * size * columns;

  float product = 0.0f;
  for (uint d = simdgroup * 32 + lane; d < size; d += SIMDGROUPS * 32) {
    const float next = fma(keep, n[d], add * float(k[d]));
    product = fma(float(q[d]) * root, next, product);
    if (group.x == 0) {
      n_next[d] = next;
    }
  }
  const float value = is_column ? float(v[head * columns + column]) * add : 0.0f;
  float sum = 0.0f;
  if (is_column) {
    for (uint d = simdgroup; d < size; d += SIMDGROUPS) {
      const ulong at = ulong(d) * columns + column;
      const float next = fma(keep, c[at], float(k[d]) * value);
      c_next[at] = next;
      sum = fma(float(q[d]) * root, next, sum);
    }
  }
  sums[simdgroup * 32 + lane] = sum;
  product = simd_sum(product);
  if (lane == 0) {
    products[simdgroup] = product;
  }
  // the parts of all simdgroups are there
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup != 0) {
    return;
  }
  sum = 0.0f;
  product = 0.0f;
  for (int s = 0; s < SIMDGROUPS; ++s) {
    sum += sums[s * 32 + lane];
    product += products[s];
  }
  const float divisor = NORMALIZE ? max(abs(product), precise::exp(-now)) + eps : 1.0f;
  if (is_column) {
    h[head * columns + column] = T(sum / divisor);
  }
  if (group.x == 0 && lane == 0) {
    m_next[head] = now;
  }
}
