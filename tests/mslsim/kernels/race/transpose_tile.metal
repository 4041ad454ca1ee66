#include <metal_stdlib>
using namespace metal;

kernel void transpose(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                      uint2 t [[thread_position_in_threadgroup]]) {
  threadgroup float tile[8][9];
  tile[t.y][t.x] = 0;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  tile[t.y][t.x] = x[t.y * 8 + t.x];
  y[t.y * 8 + t.x] = tile[t.x][t.y];
}
