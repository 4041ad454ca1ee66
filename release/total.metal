// A kernel for the check of mslsim's wheel.
#include <metal_stdlib>
using namespace metal;

kernel void total(device const float* x [[buffer(0)]], device float* sum [[buffer(1)]],
                  uint i [[thread_position_in_threadgroup]]) {
  const float part = simd_sum(x[i]);
  if (i == 0) *sum = part;
}
