#include <metal_stdlib>
using namespace metal;

kernel void sum(device const float* x [[buffer(0)]], device float* out [[buffer(1)]]) {
  out[0] = 0;
  for (uint i = 7; i >= 0; --i) {
    out[0] += x[i % 8];
  }
}
