#include <metal_stdlib>
using namespace metal;

kernel void pick(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) {
  float v;
  if (x[i] > 0) {
    v = 1;
  }
  out[i] = v;
}
