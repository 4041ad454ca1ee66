#include <metal_stdlib>
using namespace metal;

kernel void k(device float* out [[buffer(0)]],
              device float* more [[buffer(31)]],
              uint i [[thread_position_in_grid]]) {
  out[i] = i;
}
