#include <metal_stdlib>
using namespace metal;

kernel void smooth(device float* x [[buffer(0)]], uint t [[thread_position_in_threadgroup]]) {
  const float next = t < 63 ? x[t + 1] : 0;
  x[t] += next;
}
