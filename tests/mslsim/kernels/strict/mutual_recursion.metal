#include <metal_stdlib>
using namespace metal;

float odd(uint n);
float even(uint n) {
  return n == 0 ? 1.0f : odd(n - 1);
}
float odd(uint n) {
  return n == 0 ? 0.0f : even(n - 1);
}

kernel void k(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  out[i] = even(i);
}
