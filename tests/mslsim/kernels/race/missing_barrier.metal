#include <metal_stdlib>
using namespace metal;

kernel void reverse(device float* out [[buffer(0)]], uint t [[thread_position_in_threadgroup]]) {
  threadgroup float a[64];
  a[63 - t] = 0;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  a[t] = t;
  out[t] = a[63 - t];
}
