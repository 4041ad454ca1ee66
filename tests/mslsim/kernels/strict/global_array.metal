#include <metal_stdlib>
using namespace metal;

const float table[4] = {1, 2, 3, 4};

kernel void k(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  out[i] = table[i % 4];
}
