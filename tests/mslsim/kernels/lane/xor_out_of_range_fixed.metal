#include <metal_stdlib>
using namespace metal;

kernel void butterfly(device float* x [[buffer(0)]], uint t [[thread_position_in_threadgroup]]) {
  float v = x[t];
  for (ushort d = 16; d > 0; d /= 2) {
    v += simd_shuffle_xor(v, d);
  }
  x[t] = v;
}
