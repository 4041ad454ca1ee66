#include <metal_stdlib>
using namespace metal;

kernel void partial(device float* out [[buffer(0)]], uint t [[thread_position_in_threadgroup]]) {
  const bool low = t % 32 < 10;
  const float sum = simd_sum(low ? float(t) : 0.0f);
  const float most = simd_max(low ? -INFINITY : float(t));
  out[t] = low ? sum : most;
}
