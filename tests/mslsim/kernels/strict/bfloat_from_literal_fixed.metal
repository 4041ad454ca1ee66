#include <metal_stdlib>
using namespace metal;

kernel void k(device bfloat* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  bfloat v = bfloat(0.5);
  out[i] = v;
}
