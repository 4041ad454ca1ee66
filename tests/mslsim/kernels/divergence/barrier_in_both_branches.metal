#include <metal_stdlib>
using namespace metal;

kernel void both(device float* out [[buffer(0)]], uint t [[thread_position_in_threadgroup]]) {
  if (t < 32) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[t] = 1;
  } else {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[t] = 2;
  }
}
