#include <metal_stdlib>
using namespace metal;

kernel void two_sums(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                     uint t [[thread_position_in_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]],
                     uint warp [[simdgroup_index_in_threadgroup]]) {
  threadgroup float scratch[2];
  float sum = simd_sum(x[t]);
  if (lane == 0) scratch[warp] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float total = scratch[0] + scratch[1];
  sum = simd_sum(x[t] - total);
  if (lane == 0) scratch[warp] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = scratch[0] + scratch[1];
}
