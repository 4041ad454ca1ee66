#include <metal_stdlib>
using namespace metal;

kernel void sum(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                uint t [[thread_position_in_threadgroup]]) {
  threadgroup float a[64];
  a[t] = x[t];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint d = 32; d > 0; d /= 2) {
    if (t < d) {
      a[t] += a[t + d];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (t == 0) out[0] = a[0];
}
