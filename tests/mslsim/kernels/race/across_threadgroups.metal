#include <metal_stdlib>
using namespace metal;

kernel void accumulate(device float* sum [[buffer(0)]], device const float* x [[buffer(1)]],
                       uint i [[thread_position_in_grid]],
                       uint t [[thread_position_in_threadgroup]]) {
  sum[t] += x[i];
}
