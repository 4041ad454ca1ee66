#include <metal_stdlib>
using namespace metal;

float factorial(uint n) {
  float product = 1;
  for (uint k = 2; k <= n; ++k) product *= k;
  return product;
}

kernel void k(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  out[i] = factorial(i % 4);
}
