#include <metal_stdlib>
using namespace metal;

kernel void half_group(device float* out [[buffer(0)]],
                       uint t [[thread_position_in_threadgroup]]) {
  threadgroup float a[64];
  a[t] = t;
  if (t < 32) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  out[t] = a[t];
}
