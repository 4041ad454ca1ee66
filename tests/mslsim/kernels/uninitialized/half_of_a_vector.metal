#include <metal_stdlib>
using namespace metal;

kernel void swap(device float4* out [[buffer(0)]], uint t [[thread_position_in_threadgroup]]) {
  threadgroup float a[128];
  a[t * 4] = t;
  a[t * 4 + 1] = t;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = ((threadgroup float4*)a)[31 - t];
}
