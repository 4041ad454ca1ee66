#include <metal_stdlib>
using namespace metal;

kernel void rotate_left(device float* out [[buffer(0)]],
                        uint t [[thread_position_in_threadgroup]]) {
  threadgroup float a[64];
  threadgroup float b[64];
  b[t] = 0;
  a[t + 1] = t;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = a[t] + b[t];
}
