#include <metal_stdlib>
using namespace metal;

kernel void fetch(device float* x [[buffer(0)]], uint t [[thread_position_in_threadgroup]]) {
  x[t] = simd_shuffle(x[t], ushort((t + 1) % 32));
}
