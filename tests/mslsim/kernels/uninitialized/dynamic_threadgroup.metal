#include <metal_stdlib>
using namespace metal;

kernel void copy(device float* out [[buffer(0)]], threadgroup float* scratch [[threadgroup(0)]],
                 uint t [[thread_position_in_threadgroup]]) {
  if (t % 2 == 0) scratch[t] = t;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = scratch[t];
}
