#include <metal_stdlib>
using namespace metal;

struct Pair {
  float a, b;
};
float sum(const Pair& p) {
  return p.a + p.b;
}

kernel void k(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  const Pair p = {1, 2};
  out[i] = sum(p);
}
