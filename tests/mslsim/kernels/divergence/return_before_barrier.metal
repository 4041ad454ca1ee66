#include <metal_stdlib>
using namespace metal;

kernel void shift(device float* x [[buffer(0)]], constant uint& n [[buffer(1)]],
                  uint i [[thread_position_in_grid]]) {
  if (i >= n) return;
  const float v = x[(i + 1) % n];
  threadgroup_barrier(mem_flags::mem_device);
  x[i] = v;
}
