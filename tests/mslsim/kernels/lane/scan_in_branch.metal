#include <metal_stdlib>
using namespace metal;

kernel void scan(device int* x [[buffer(0)]], uint i [[thread_position_in_grid]],
                 uint lane [[thread_index_in_simdgroup]]) {
  int v = x[i];
  if (lane >= 1) v += simd_shuffle_up(v, 1);
  threadgroup_barrier(mem_flags::mem_none);
  x[i] = v;
}
