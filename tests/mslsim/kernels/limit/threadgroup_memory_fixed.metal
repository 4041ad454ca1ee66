#include <metal_stdlib>
using namespace metal;

kernel void big(device float* out [[buffer(0)]], uint t [[thread_position_in_threadgroup]]) {
  threadgroup float a[64 * 128];
  for (uint i = t; i < 64 * 128; i += 64) a[i] = i;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = a[(t * 31) % 4096];
}
