#include <metal_stdlib>
using namespace metal;

kernel void k(device half* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  out[i] = max(out[i], 0.0f);
}
