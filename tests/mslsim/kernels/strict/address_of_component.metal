#include <metal_stdlib>
using namespace metal;

kernel void k(device float4* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  float4 v = out[i];
  thread float* p = &v.x;
  *p = 1;
  out[i] = v;
}
