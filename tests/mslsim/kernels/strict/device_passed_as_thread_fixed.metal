#include <metal_stdlib>
using namespace metal;

void store(device float* p, float v) {
  *p = v;
}

kernel void k(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  float sum = 1;
  sum += out[i];
  store(out + i, sum);
}
