#include <metal_stdlib>
using namespace metal;

kernel void shift(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                  uint i [[thread_position_in_grid]]) {
  out[i] =
      i + 1 < 64 ? x[i + 1] : 0;
}
