#include <metal_stdlib>
using namespace metal;

kernel void softmax_sum(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                        uint t [[thread_position_in_threadgroup]]) {
  threadgroup float scratch[2];
  float v = simd_max(x[t]);
  if (t % 32 == 0) scratch[t / 32] = v;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float most = max(scratch[0], scratch[1]);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  v = simd_sum(exp(x[t] - most));
  if (t % 32 == 0) scratch[t / 32] = v;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[t] = scratch[0] + scratch[1];
}
