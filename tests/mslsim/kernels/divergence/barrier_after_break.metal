#include <metal_stdlib>
using namespace metal;

kernel void search(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                   uint t [[thread_position_in_threadgroup]]) {
  float seen = 0;
  for (uint i = 0; i < 4; ++i) {
    seen = x[i * 64 + t];
    if (seen > 1) break;
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  out[t] = seen;
}
