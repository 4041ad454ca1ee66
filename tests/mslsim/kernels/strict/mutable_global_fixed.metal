#include <metal_stdlib>
using namespace metal;

constant float bias = 1;

kernel void k(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  out[i] = bias;
}
