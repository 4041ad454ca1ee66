#include <metal_stdlib>
using namespace metal;

kernel void k(device bfloat* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  out[i] = bfloat(exp(float(out[i])));
}
