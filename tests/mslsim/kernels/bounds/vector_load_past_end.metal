#include <metal_stdlib>
using namespace metal;

kernel void scale(device const float4* x [[buffer(0)]], device float4* out [[buffer(1)]],
                  constant uint& n [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  if (i * 4 < n) {
    const float4 v = x[i];
    out[i] = v * 2;
  }
}
