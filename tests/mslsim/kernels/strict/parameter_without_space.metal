#include <metal_stdlib>
using namespace metal;

void store(float* p, float v) {
  *p = v;
}

kernel void k(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  store(out + i, 1);
}
