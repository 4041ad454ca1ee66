#include <metal_stdlib>
using namespace metal;

kernel void k(device uint* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  const int least = 3;
  out[i] = max(out[i], uint(least));
}
