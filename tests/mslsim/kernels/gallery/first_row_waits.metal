#include <metal_stdlib>
using namespace metal;

// Only the threads of the first row add up what all wrote, and only they reach the barrier.
kernel void columns(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                    uint2 t [[thread_position_in_threadgroup]]) {
  threadgroup float part[4][8];
  part[t.y][t.x] = x[8 * t.y + t.x];
  if (t.y == 0) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[t.x] = part[0][t.x] + part[1][t.x] + part[2][t.x] + part[3][t.x];
  }
}
