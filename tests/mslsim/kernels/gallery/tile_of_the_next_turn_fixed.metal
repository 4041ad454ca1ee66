#include <metal_stdlib>
using namespace metal;

// A simdgroup unpacks a tile, multiplies with it, and unpacks the next one into the same memory.
kernel void product(device const char* q [[buffer(0)]], device float* y [[buffer(1)]],
                    uint t [[thread_position_in_threadgroup]]) {
  threadgroup half tile[64];
  simdgroup_half8x8 a;
  simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0);
  for (uint k = 0; k < 3; ++k) {
    for (uint i = t; i < 64; i += 32) tile[i] = half(q[64 * k + i]) / 16;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_load(a, tile, 8);
    simdgroup_multiply_accumulate(sum, a, a, sum);
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  simdgroup_store(sum, y, 8);
}
