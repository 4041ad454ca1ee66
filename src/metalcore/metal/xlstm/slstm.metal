// SPDX-License-Identifier: MIT
// g = x_t + R y_(t-1) + b, of the gates i, f, z, o
// m_t = max(lf + m_(t-1), i), or i where n_(t-1) = 0;  keep = exp(lf + m_(t-1) - m_t), add = exp(i
// - m_t);  c_t = keep c_(t-1) + add tanh(z), n_t = keep n_(t-1) + add, y_t = sigmoid(o) c_t / n_t
//
// One threadgroup per head of a batch entry, all steps: what a head gave is in threadgroup memory
// for the next step. Forward, a thread per gate and column reads down the weights, neighbours side
// by side; back, a simdgroup per row. SIZE values of a head at most.

#include "gates.h"

inline float sigmoid_of(float x) { return 1.0f / (1.0f + precise::exp(-x)); }

// Sizes of a call, in the order of the argument.
struct slstm_sizes {
  constant long* size;

  ulong entries() const { return ulong(size[0]); }
  int steps() const { return int(size[1]); }
  uint heads() const { return uint(size[2]); }
  uint head() const { return uint(size[3]); }
  // Of all heads side by side.
  ulong row() const { return ulong(size[2]) * ulong(size[3]); }
};

// KEPT values of each step and column, for the gradient: add, keep, tanh(z), sigmoid(o), 1 -
// sigmoid(f), c and n.
constant constexpr uint KEPT = 7;

// `before` is y_(t-1) of all steps, [heads, entries * steps, size].
template <typename T, typename W, int SIZE, int LANES, bool BIAS, bool STATES, bool KEEPS>
[[max_total_threads_per_threadgroup(LANES * 4)]] kernel void slstm(
    device const T* x [[buffer(0)]],
    device const W* recurrent [[buffer(1)]],
    device const W* bias [[buffer(2)]],
    device const float* states [[buffer(3)]],
    device T* y [[buffer(4)]],
    device float* last [[buffer(5)]],
    device float* kept [[buffer(6)]],
    device float* before [[buffer(7)]],
    constant long* size_list [[buffer(8)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 thread_in_group [[thread_position_in_threadgroup]]) {
  threadgroup float gates[SIZE * 4];
  threadgroup float given[SIZE];
  threadgroup float cs[SIZE];
  threadgroup float ns[SIZE];
  threadgroup float ms[SIZE];
  const slstm_sizes s = {size_list};
  const uint size = s.head();
  const ulong head = group.y;
  const ulong entry = group.z;
  const uint lane = thread_in_group.x;
  const uint gate = thread_in_group.y;
  const ulong own = (entry * 4 * s.heads() + head) * size;
  const ulong part = s.row();
  recurrent += head * size * size * 4 + gate * size;
  bias += (head * 4 + gate) * size;
  x += entry * s.steps() * 4 * s.row() + gate * s.row() + head * size;
  y += entry * s.steps() * s.row() + head * size;
  kept += (entry * s.heads() + head) * s.steps() * KEPT * size;
  before += (head * s.entries() + entry) * s.steps() * size;
  if (gate == 0) {
    for (uint d = lane; d < size; d += LANES) {
      given[d] = STATES ? states[own + d] : 0.0f;
      cs[d] = STATES ? states[part + own + d] : 0.0f;
      ns[d] = STATES ? states[2 * part + own + d] : 0.0f;
      ms[d] = STATES ? states[3 * part + own + d] : 0.0f;
    }
  }
  for (int t = 0; t < s.steps(); ++t) {
    // what the head gave is there, and the gates of the last step have been read
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint d = lane; d < size; d += LANES) {
      float sum = float(x[d]) + (BIAS ? float(bias[d]) : 0.0f);
      for (uint k = 0; k < size; ++k) {
        sum = fma(given[k], float(recurrent[ulong(k) * 4 * size + d]), sum);
      }
      gates[gate * SIZE + d] = sum;
    }
    // all gates are there, and nobody reads what the head gave any more
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (gate == 0) {
      for (uint d = lane; d < size; d += LANES) {
        const float i = gates[d];
        const float f = gates[SIZE + d];
        const bool is_empty = ns[d] == 0.0f;
        const float held = log_sigmoid(f) + ms[d];
        const float now = is_empty ? i : max(held, i);
        const float add = precise::exp(i - now);
        const float keep = is_empty ? 0.0f : precise::exp(held - now);
        const float z = precise::tanh(gates[2 * SIZE + d]);
        const float o = sigmoid_of(gates[3 * SIZE + d]);
        const float c = (is_empty ? 0.0f : keep * cs[d]) + add * z;
        const float n = fma(keep, ns[d], add);
        if (KEEPS) {
          before[d] = given[d];
          kept[d] = add;
          kept[size + d] = keep;
          kept[2 * size + d] = z;
          kept[3 * size + d] = o;
          kept[4 * size + d] = sigmoid_of(-f);
          kept[5 * size + d] = c;
          kept[6 * size + d] = n;
        } else {
          y[d] = T(o * (c / n));
        }
        given[d] = o * (c / n);
        cs[d] = c;
        ns[d] = n;
        ms[d] = now;
      }
    }
    x += 4 * s.row();
    y += s.row();
    kept += KEPT * size;
    before += size;
  }
  if (!KEEPS && gate == 0) {
    for (uint d = lane; d < size; d += LANES) {
      last[own + d] = given[d];
      last[part + own + d] = cs[d];
      last[2 * part + own + d] = ns[d];
      last[3 * part + own + d] = ms[d];
    }
  }
}

// grads: those of the gates again, in float, [heads, entries * steps, 4, size].
template <typename T, typename W, int SIZE, int SIMDGROUPS, bool STATES, bool DLAST, bool CLIPS>
[[max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] kernel void slstm_backward(
    device const T* dy [[buffer(0)]],
    device const float* dlast [[buffer(1)]],
    device const W* recurrent [[buffer(2)]],
    device const float* states [[buffer(3)]],
    device const float* kept [[buffer(4)]],
    device T* dx [[buffer(5)]],
    device float* grads [[buffer(6)]],
    device float* dstates [[buffer(7)]],
    constant long* size_list [[buffer(8)]],
    constant float& clip [[buffer(9)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float gates[SIZE * 4];
  threadgroup float from_later[SIZE];
  threadgroup float dcs[SIZE];
  threadgroup float dns[SIZE];
  threadgroup float dms[SIZE];
  constexpr uint THREADS = SIMDGROUPS * 32;
  const slstm_sizes s = {size_list};
  const uint size = s.head();
  const ulong head = group.y;
  const ulong entry = group.z;
  const uint place = simdgroup * 32 + lane;
  const ulong own = (entry * 4 * s.heads() + head) * size;
  const ulong part = s.row();
  const int steps = s.steps();
  recurrent += head * size * size * 4;
  dy += entry * steps * s.row() + head * size;
  dx += entry * steps * 4 * s.row() + head * size;
  kept += (entry * s.heads() + head) * steps * KEPT * size;
  grads += (head * s.entries() + entry) * steps * 4 * size;
  for (uint d = place; d < size; d += THREADS) {
    from_later[d] = DLAST ? dlast[own + d] : 0.0f;
    const float dc = DLAST ? dlast[part + own + d] : 0.0f;
    const float dn = DLAST ? dlast[2 * part + own + d] : 0.0f;
    const float dm = DLAST ? dlast[3 * part + own + d] : 0.0f;
    const ulong end = ulong(steps - 1) * KEPT * size + d;
    dcs[d] = dc;
    dns[d] = dn;
    dms[d] = dm - dc * kept[end + 5 * size] - dn * kept[end + 6 * size];
  }
  for (int t = steps - 1; t >= 0; --t) {
    device const float* now = kept + ulong(t) * KEPT * size;
    device const float* then = now - KEPT * size;
    device T* to = dx + ulong(t) * 4 * s.row();
    device float* copy = grads + ulong(t) * 4 * size;
    for (uint d = place; d < size; d += THREADS) {
      const float add = now[d];
      const float keep = now[size + d];
      const float z = now[2 * size + d];
      const float o = now[3 * size + d];
      const float forgets = now[4 * size + d];
      const float n = now[6 * size + d];
      const float y = o * (now[5 * size + d] / n);
      float c_before = 0.0f;
      float n_before = 0.0f;
      if (t > 0) {
        c_before = then[5 * size + d];
        n_before = then[6 * size + d];
      } else if (STATES) {
        n_before = states[2 * part + own + d];
        c_before = n_before == 0.0f ? 0.0f : states[part + own + d];
      }
      const float whole = float(dy[ulong(t) * s.row() + d]) + from_later[d];
      const float dc = fma(whole / n, o, dcs[d]);
      const float dn = fma(-whole / n, y, dns[d]);
      // m is that of i
      const bool takes_i = add == 1.0f;
      const float passed = takes_i ? 0.0f : dms[d];
      const float of_i = add * fma(z, dc, dn) + (takes_i ? dms[d] : 0.0f);
      const float of_f = (keep * fma(c_before, dc, n_before * dn) + passed) * forgets;
      const float of_z = add * dc * (1.0f - z) * (1.0f + z);
      const float of_o = (1.0f - o) * y * whole;
      const float of[4] = {of_i, of_f, of_z, of_o};
#pragma unroll
      for (uint g = 0; g < 4; ++g) {
        gates[g * size + d] = of[g];
        copy[g * size + d] = of[g];
        to[g * s.row() + d] = T(of[g]);
      }
      dcs[d] = keep * dc;
      dns[d] = keep * dn;
      dms[d] = passed;
    }
    // the gradients of all gates are there
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint d = simdgroup; d < size; d += SIMDGROUPS) {
      float sum = 0.0f;
      for (uint j = lane; j < 4 * size; j += 32) {
        sum = fma(float(recurrent[ulong(d) * 4 * size + j]), gates[j], sum);
      }
      sum = simd_sum(sum);
      if (lane == 0) {
        from_later[d] = CLIPS ? clamp(sum, -clip, clip) : sum;
      }
    }
    // what comes back is there, and nobody reads the gates any more
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (STATES) {
    for (uint d = place; d < size; d += THREADS) {
      dstates[own + d] = from_later[d];
      dstates[part + own + d] = dcs[d];
      dstates[2 * part + own + d] = dns[d];
      dstates[3 * part + own + d] =
          dms[d] + dcs[d] * states[part + own + d] + dns[d] * states[2 * part + own + d];
    }
  }
}
