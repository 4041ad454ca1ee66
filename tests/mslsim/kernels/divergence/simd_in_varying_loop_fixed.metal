#include <metal_stdlib>
using namespace metal;

kernel void loops(device float* out [[buffer(0)]], uint t [[thread_position_in_threadgroup]]) {
  float v = 0;
  for (uint i = 0; i < 4; ++i) {
    v += simd_sum(1.0f);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = v;
}
