#include <metal_stdlib>
using namespace metal;

kernel void widest(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                   uint i [[thread_position_in_grid]]) {
  float best;
  best = max(best, x[i]);
  out[i] = best;
}
