#include <metal_stdlib>
using namespace metal;

kernel void both(device float* out [[buffer(0)]], uint t [[thread_position_in_threadgroup]]) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t < 32) {
    out[t] = 1;
  } else {
    out[t] = 2;
  }
}
