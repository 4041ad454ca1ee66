#include <metal_stdlib>
using namespace metal;

kernel void spread(device float* x [[buffer(0)]], uint t [[thread_position_in_threadgroup]]) {
  x[t] = simd_broadcast(x[t], ushort(32));
}
