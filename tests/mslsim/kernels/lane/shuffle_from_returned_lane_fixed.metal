#include <metal_stdlib>
using namespace metal;

kernel void fetch(device float* x [[buffer(0)]], constant uint& n [[buffer(1)]],
                  uint t [[thread_position_in_threadgroup]]) {
  if (t >= n) return;
  x[t] = simd_shuffle(x[t], ushort(n - 1 - t));
}
