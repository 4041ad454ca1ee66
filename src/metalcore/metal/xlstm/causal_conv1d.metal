// SPDX-License-Identifier: MIT
// u_t = sum_j w_j x_(t-K+1+j) + b,  y = u or silu(u)
// g_t = dy_t slope(u_t),  dx_t = sum_j w_j g_(t+K-1-j),  dw_j = sum_t g_t x_(t-K+1+j),  db = sum g
//
// x is [entries, steps, channels]. One thread per channel and run of steps; its K values move on by
// one in registers, so each is read once. Neighbours read neighbouring channels.

#include "activation.h"

// Puts the next value at the end of the last K ones.
template <int K>
inline void move_on(thread float* window, float next) {
#pragma unroll
  for (int j = 0; j < K - 1; ++j) {
    window[j] = window[j + 1];
  }
  window[K - 1] = next;
}

// The steps of one channel; those before the first one are in the state, which follows on it.
template <typename T, int K, bool STATE>
struct channel_steps {
  device const T* x;
  device const T* state;
  ulong channels;

  float at(int t) const {
    if (t >= 0) {
      return float(x[ulong(t) * channels]);
    }
    return STATE ? float(state[ulong(t + K - 1) * channels]) : 0.0f;
  }
};

template <typename T, typename W, int K, bool SILU, bool BIAS, bool STATE>
[[max_total_threads_per_threadgroup(256)]] kernel void causal_conv1d(
    device const T* x [[buffer(0)]],
    device const W* weight [[buffer(1)]],
    device const W* bias [[buffer(2)]],
    device const T* state [[buffer(3)]],
    device T* y [[buffer(4)]],
    device T* last [[buffer(5)]],
    constant uint& steps [[buffer(6)]],
    constant uint& channels [[buffer(7)]],
    constant uint& run [[buffer(8)]],
    uint3 place [[thread_position_in_grid]]) {
  const uint channel = place.x;
  const ulong entry = place.z;
  const channel_steps<T, K, STATE> from = {
      x + entry * steps * channels + channel, state + entry * (K - 1) * channels + channel,
      channels};
  float w[K];
  float window[K];
#pragma unroll
  for (int j = 0; j < K; ++j) {
    w[j] = float(weight[channel * K + j]);
  }
  const float b = BIAS ? float(bias[channel]) : 0.0f;
  const int first = int(place.y * run);
  const int end = min(int(steps), first + int(run));
#pragma unroll
  for (int j = 1; j < K; ++j) {
    window[j] = from.at(first - K + j);
  }
  y += entry * steps * channels + channel;
  for (int t = first; t < end; ++t) {
    move_on<K>(window, from.at(t));
    float u = b;
#pragma unroll
    for (int j = 0; j < K; ++j) {
      u = fma(w[j], window[j], u);
    }
    y[ulong(t) * channels] = T(SILU ? silu_of::value(u) : u);
  }
  if (place.y == 0) {
    last += entry * (K - 1) * channels + channel;
    for (int r = 0; r < K - 1; ++r) {
      last[ulong(r) * channels] = T(from.at(int(steps) - (K - 1) + r));
    }
  }
}

// share: [entries, runs, K + 1, channels], each run's part of dweight and dbias.
template <typename T, typename W, int K, bool SILU, bool BIAS, bool STATE, bool DLAST>
[[max_total_threads_per_threadgroup(256)]] kernel void causal_conv1d_backward(
    device const T* dy [[buffer(0)]],
    device const T* dlast [[buffer(1)]],
    device const T* x [[buffer(2)]],
    device const W* weight [[buffer(3)]],
    device const W* bias [[buffer(4)]],
    device const T* state [[buffer(5)]],
    device T* dx [[buffer(6)]],
    device T* dstate [[buffer(7)]],
    device float* share [[buffer(8)]],
    constant uint& steps [[buffer(9)]],
    constant uint& channels [[buffer(10)]],
    constant uint& run [[buffer(11)]],
    uint3 place [[thread_position_in_grid]],
    uint3 grid [[threads_per_grid]]) {
  const uint channel = place.x;
  const ulong entry = place.z;
  const channel_steps<T, K, STATE> from = {
      x + entry * steps * channels + channel, state + entry * (K - 1) * channels + channel,
      channels};
  const ulong begin = entry * steps * channels + channel;
  const ulong begin_state = entry * (K - 1) * channels + channel;
  float w[K];
  float window[K];
  float g[K];
  float sums[K + 1];
  sums[K] = 0.0f;
#pragma unroll
  for (int j = 0; j < K; ++j) {
    w[j] = float(weight[channel * K + j]);
    g[j] = 0.0f;
    sums[j] = 0.0f;
  }
  const float b = BIAS ? float(bias[channel]) : 0.0f;
  const int first = int(place.y * run);
  const int end = min(int(steps), first + int(run));
#pragma unroll
  for (int j = 1; j < K; ++j) {
    window[j] = from.at(first - K + j);
  }
  // the gradient of step t - K + 1 is known when that of step t is
  for (int t = first; t < end + K - 1; ++t) {
    float d = 0.0f;
    if (t < int(steps)) {
      move_on<K>(window, from.at(t));
      d = float(dy[begin + ulong(t) * channels]);
      if (SILU) {
        float u = b;
#pragma unroll
        for (int j = 0; j < K; ++j) {
          u = fma(w[j], window[j], u);
        }
        d *= silu_of::both(u).slope;
      }
    }
    move_on<K>(g, d);
    if (t < end) {
#pragma unroll
      for (int j = 0; j < K; ++j) {
        sums[j] = fma(d, window[j], sums[j]);
      }
      sums[K] += d;
    }
    const int past = t - (K - 1);
    if (past < (STATE ? -(K - 1) : 0) || (past < first && first > 0)) {
      continue;
    }
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < K; ++j) {
      sum = fma(w[j], g[K - 1 - j], sum);
    }
    const int from_end = past - (int(steps) - (K - 1));
    if (DLAST && from_end >= 0) {
      sum += float(dlast[begin_state + ulong(from_end) * channels]);
    }
    if (past >= 0) {
      dx[begin + ulong(past) * channels] = T(sum);
    } else {
      dstate[begin_state + ulong(past + K - 1) * channels] = T(sum);
    }
  }
  share += (entry * grid.y + place.y) * (K + 1) * channels + channel;
#pragma unroll
  for (int j = 0; j < K + 1; ++j) {
    share[ulong(j) * channels] = sums[j];
  }
}

// One thread per channel and weight; the last one is the bias.
template <typename W, int K, bool BIAS>
[[max_total_threads_per_threadgroup(256)]] kernel void causal_conv1d_weights(
    device const float* share [[buffer(0)]],
    device W* dweight [[buffer(1)]],
    device W* dbias [[buffer(2)]],
    constant uint& runs [[buffer(3)]],
    constant uint& channels [[buffer(4)]],
    uint2 place [[thread_position_in_grid]]) {
  share += ulong(place.y) * channels + place.x;
  float sum = 0.0f;
  for (uint r = 0; r < runs; ++r) {
    sum += share[ulong(r) * (K + 1) * channels];
  }
  if (place.y < K) {
    dweight[place.x * K + place.y] = W(sum);
  } else if (BIAS) {
    dbias[place.x] = W(sum);
  }
}
