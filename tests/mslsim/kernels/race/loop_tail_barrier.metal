#include <metal_stdlib>
using namespace metal;

kernel void rows(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                 uint t [[thread_position_in_threadgroup]]) {
  threadgroup float tile[64];
  float sum = 0;
  for (uint k = 0; k < 4; ++k) {
    tile[t] = x[k * 64 + t];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum += tile[63 - t];
  }
  out[t] = sum;
}
