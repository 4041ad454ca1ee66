#include <metal_stdlib>
using namespace metal;

kernel void shift(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                  uint i [[thread_position_in_grid]]) {
  const float left = i > 0 ? x[int(i) - 1] : 0;
  out[i] = left;
}
