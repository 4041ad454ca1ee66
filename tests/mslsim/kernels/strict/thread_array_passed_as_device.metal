#include <metal_stdlib>
using namespace metal;

void clear(device float* p, uint n) {
  for (uint k = 0; k < n; ++k) p[k] = 0;
}

kernel void k(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  float local[4];
  clear(local, 4);
  out[i] = local[i % 4];
}
