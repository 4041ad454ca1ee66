#include <metal_stdlib>
using namespace metal;

kernel void fetch(device float* x [[buffer(0)]], uint t [[thread_position_in_threadgroup]],
                  uint n [[threads_per_threadgroup]]) {
  x[t] = simd_shuffle_xor(x[t], ushort(16));
}
