#include <metal_stdlib>
using namespace metal;

kernel void reverse(device float* out [[buffer(0)]], uint t [[thread_position_in_threadgroup]]) {
  threadgroup float a[32];
  a[t] = t;
  if (t < 16) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = a[31 - t];
}
