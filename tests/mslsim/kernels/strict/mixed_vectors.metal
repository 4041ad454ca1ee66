#include <metal_stdlib>
using namespace metal;

kernel void k(device float4* out [[buffer(0)]], device const half4* x [[buffer(1)]],
              uint i [[thread_position_in_grid]]) {
  out[i] = out[i] * x[i];
}
