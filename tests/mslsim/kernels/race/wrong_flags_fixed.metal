#include <metal_stdlib>
using namespace metal;

kernel void reverse(device float* out [[buffer(0)]], device float* work [[buffer(1)]],
                    uint t [[thread_position_in_threadgroup]]) {
  work[t] = t;
  threadgroup_barrier(mem_flags::mem_device);
  out[t] = work[63 - t];
}
