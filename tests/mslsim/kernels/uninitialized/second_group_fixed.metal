#include <metal_stdlib>
using namespace metal;

kernel void carry(device float* out [[buffer(0)]], uint g [[threadgroup_position_in_grid]],
                  uint t [[thread_position_in_threadgroup]]) {
  threadgroup float a[32];
  a[t] = t;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[g * 32 + t] = a[t];
}
