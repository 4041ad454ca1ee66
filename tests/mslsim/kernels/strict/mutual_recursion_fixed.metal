#include <metal_stdlib>
using namespace metal;

float even(uint n) { return n % 2 == 0; }

kernel void k(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  out[i] = even(i);
}
