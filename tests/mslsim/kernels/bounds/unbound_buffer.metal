#include <metal_stdlib>
using namespace metal;

kernel void add_bias(device float* out [[buffer(0)]], device const float* bias [[buffer(1)]],
                     constant uint& has_bias [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  out[i] += bias[i] * has_bias;
}
