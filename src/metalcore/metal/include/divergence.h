// SPDX-License-Identifier: MIT
// What kl_div and jsd share: kernels over a divergence D of two chunks, made from one parameter:
// `value(x, t)`, and `slopes(x, t, dx, dt)`, the derivatives by x and t. Lengths are in chunks.
#pragma once

#include "chunk.h"
#include "reduce.h"

// p * v, and 0 where p is 0 and v may be infinite.
inline float times(float p, float v) { return p == 0.0f ? 0.0f : p * v; }
inline float4 times(float4 p, float4 v) { return select(p * v, float4(0.0f), p == 0.0f); }

// One thread per chunk.
template <typename D, typename T, int WIDTH>
[[max_total_threads_per_threadgroup(512)]] kernel void divergence(
    device const typename chunk<T, WIDTH>::stored* input [[buffer(0)]],
    device const typename chunk<T, WIDTH>::stored* target [[buffer(1)]],
    device typename chunk<T, WIDTH>::stored* loss [[buffer(2)]],
    constant uint& n [[buffer(3)]],
    constant float& parameter [[buffer(4)]],
    constant float& scale [[buffer(5)]],
    uint i [[thread_position_in_grid]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  if (i < n) {
    loss[i] = stored(D(parameter).value(wide(input[i]), wide(target[i])) * scale);
  }
}

// One threadgroup per run of chunks, whose sum it leaves in partial.
template <typename D, typename T, int WIDTH>
[[max_total_threads_per_threadgroup(512)]] kernel void divergence_sum(
    device const typename chunk<T, WIDTH>::stored* input [[buffer(0)]],
    device const typename chunk<T, WIDTH>::stored* target [[buffer(1)]],
    device float* partial [[buffer(2)]],
    constant long& n [[buffer(3)]],
    constant uint& run [[buffer(4)]],
    constant float& parameter [[buffer(5)]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  typedef typename chunk<T, WIDTH>::wide wide;
  threadgroup float scratch[32];
  const ulong first = ulong(group) * run;
  const uint count = uint(min(ulong(run), ulong(n) - first));
  input += first;
  target += first;
  float sum = 0.0f;
  for (uint i = lane; i < count; i += lanes) {
    sum += total(D(parameter).value(wide(input[i]), wide(target[i])));
  }
  sum = threadgroup_sum(sum, scratch, lane, lanes);
  if (lane == 0) {
    partial[group] = sum;
  }
}

// One threadgroup: the sums of all runs, in an order that depends on their number alone.
[[max_total_threads_per_threadgroup(512)]] kernel void divergence_total(
    device const float* partial [[buffer(0)]],
    device float* loss [[buffer(1)]],
    constant uint& runs [[buffer(2)]],
    constant float& scale [[buffer(3)]],
    uint lane [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  threadgroup float scratch[32];
  float sum = 0.0f;
  for (uint i = lane; i < runs; i += lanes) {
    sum += partial[i];
  }
  sum = threadgroup_sum(sum, scratch, lane, lanes);
  if (lane == 0) {
    *loss = sum * scale;
  }
}

// One thread per chunk. `dloss` is one number, `*dsum`, where the loss was reduced.
template <typename D, typename T, int WIDTH, bool REDUCED, bool DTARGET>
[[max_total_threads_per_threadgroup(512)]] kernel void divergence_backward(
    device const typename chunk<T, WIDTH>::stored* dloss [[buffer(0)]],
    constant float* dsum [[buffer(1)]],
    device const typename chunk<T, WIDTH>::stored* input [[buffer(2)]],
    device const typename chunk<T, WIDTH>::stored* target [[buffer(3)]],
    device typename chunk<T, WIDTH>::stored* dinput [[buffer(4)]],
    device typename chunk<T, WIDTH>::stored* dtarget [[buffer(5)]],
    constant uint& n [[buffer(6)]],
    constant float& parameter [[buffer(7)]],
    constant float& scale [[buffer(8)]],
    uint i [[thread_position_in_grid]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  if (i < n) {
    const wide d = (REDUCED ? wide(*dsum) : wide(dloss[i])) * scale;
    wide dx, dt;
    D(parameter).slopes(wide(input[i]), wide(target[i]), dx, dt);
    dinput[i] = stored(d * dx);
    if (DTARGET) {
      dtarget[i] = stored(d * dt);
    }
  }
}
