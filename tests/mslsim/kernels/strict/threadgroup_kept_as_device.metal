#include <metal_stdlib>
using namespace metal;

kernel void k(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  threadgroup float a[32];
  a[i] = i;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  device float* p = a;
  out[i] = p[31 - i];
}
