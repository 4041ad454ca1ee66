#include <metal_stdlib>
using namespace metal;

kernel void sum(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                uint t [[thread_position_in_threadgroup]]) {
  threadgroup float a[64];
  a[t] = 0;
  for (uint i = 0; i < 4; ++i) {
    a[t] += x[i * 64 + t];
  }
  out[t] = a[t];
}
