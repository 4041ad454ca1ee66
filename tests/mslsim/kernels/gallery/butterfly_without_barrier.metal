#include <metal_stdlib>
using namespace metal;

kernel void butterfly(device float* x [[buffer(0)]], uint t [[thread_position_in_threadgroup]]) {
  threadgroup float v[64];
  v[t] = x[t];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint half_size = 32; half_size > 0; half_size /= 2) {
    const float other = v[t ^ half_size];
    v[t] = t & half_size ? other - v[t] : other + v[t];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  x[t] = v[t];
}
