#include <metal_stdlib>
using namespace metal;

kernel void loops(device float* out [[buffer(0)]], uint t [[thread_position_in_threadgroup]]) {
  float sum = 0;
  for (uint i = 0; i < 2; ++i) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum += i;
  }
  out[t] = sum;
}
