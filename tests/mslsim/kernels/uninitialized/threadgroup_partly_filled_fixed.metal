#include <metal_stdlib>
using namespace metal;

kernel void copy(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                 uint t [[thread_position_in_threadgroup]]) {
  threadgroup float a[64];
  a[t] = t < 48 ? x[t] : 0;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = a[t];
}
