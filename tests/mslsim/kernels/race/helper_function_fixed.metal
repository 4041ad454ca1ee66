#include <metal_stdlib>
using namespace metal;

inline float total(float v, threadgroup float* scratch, uint t) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  v = simd_sum(v);
  if (t % 32 == 0) scratch[t / 32] = v;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return scratch[0] + scratch[1];
}

kernel void variance(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                     uint t [[thread_position_in_threadgroup]]) {
  threadgroup float scratch[2];
  const float mean = total(x[t], scratch, t) / 64;
  out[t] = total((x[t] - mean) * (x[t] - mean), scratch, t) / 64;
}
